"""Paged attention of one token per sequence, split over the context.

The context of a sequence is cut into at most `Tuning.max_splits` ranges, so that a few long
sequences still fill a GPU; each range is reduced by a program of its own and a second kernel
merges the ranges in order (flash-decoding: Dao, Haziza, Massa & Sizov 2023). How a sequence is cut
depends on its own length alone: its sums have one order whatever runs beside it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.pallas.common import (
    Attention,
    cap_splits,
    check_attention,
    context_ranges,
    empty_state,
    load_queries,
    load_rows,
    pool_specs,
    softmax_step,
    store_result,
    store_rows,
    whole,
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the decode kernel is cut.

    Attributes:
      tile_blocks: blocks per iteration; a power of two.
      split_blocks: least blocks of context per split, a multiple of `tile_blocks`.
      max_splits: most splits of a context.
      num_warps, num_stages: as Triton means them.
    """

    tile_blocks: int
    split_blocks: int
    max_splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.tile_blocks & (self.tile_blocks - 1):
            raise ValueError(f"{self.tile_blocks=} must be a power of two")
        if self.split_blocks % self.tile_blocks:
            raise ValueError(f"{self.split_blocks=} must be a multiple of {self.tile_blocks=}")


def default_tuning(fixed: Attention) -> Tuning:
    """Tiles of 64 tokens, 32 where operands are large; splits of at least 512 tokens.

    A block of V has at least 16 bytes for each thread, and so is loaded in pieces of no less.
    """
    large = fixed.head_dim > 128 or fixed.dtype == "float32"
    return Tuning(
        tile_blocks=max(1, (32 if large else 64) // fixed.block_size),
        split_blocks=512 // fixed.block_size,
        max_splits=16,
        num_warps=min(4, fixed.block_size * fixed.value_row_bytes // (16 * 32)),
        num_stages=2 if fixed.dtype == "float32" or fixed.soft_cap is not None else 3,
    )


def _split_kernel(*refs, fixed: Attention, tuning: Tuning):
    qkv_ref, *pool_refs, table_ref, length_ref, acc_ref, top_ref, total_ref = refs
    sequence, head, split = (pl.program_id(axis) for axis in range(3))
    kv_heads = pl.num_programs(1)
    block_size, group = fixed.block_size, fixed.group
    length = length_ref[0]
    first, each, end = context_ranges(fixed, tuning, length)
    begin = first + split * each
    end = jnp.minimum(begin + each, end)

    @pl.when(begin < end)
    def _():
        row = jnp.arange(fixed.decode_rows, dtype=jnp.int32)  # [R]
        q = load_queries(fixed, qkv_ref, head * fixed.head_rows + jnp.minimum(row, group - 1))

        def masked(block, num_blocks, state):
            position = block * block_size + jnp.arange(num_blocks * block_size, dtype=jnp.int32)
            written = position < length
            seen = written if fixed.window is None else written & (position >= length - fixed.window)
            ids = table_ref[pl.ds(block, num_blocks)]
            return softmax_step(fixed, pool_refs, ids, q, state, seen=seen[None, :], written=written)

        def tile(index, state):
            block = begin + index * tuning.tile_blocks
            if fixed.window is not None:
                return masked(block, tuning.tile_blocks, state)
            return softmax_step(fixed, pool_refs, table_ref[pl.ds(block, tuning.tile_blocks)], q, state)

        # Whole tiles of whole blocks, then what is left block by block: no block is read that
        # holds nothing of the context.
        tiles = (jnp.minimum(end, length // block_size) - begin) // tuning.tile_blocks
        state = lax.fori_loop(0, tiles, tile, empty_state(fixed, fixed.decode_rows))
        rest = begin + tiles * tuning.tile_blocks
        top, total, acc = lax.fori_loop(rest, end, lambda block, state: masked(block, 1, state), state)

        # Rows past the group lie in the next program's place, and are not stored.
        place = ((sequence * kv_heads + head) * tuning.max_splits + split) * group + row
        triton.store(top_ref.at[place], top, mask=row < group)
        triton.store(total_ref.at[place], total, mask=row < group)
        store_rows(fixed, acc_ref, place, acc, row < group)


def _merge_kernel(length_ref, acc_ref, top_ref, total_ref, out_ref, *, fixed: Attention, tuning: Tuning):
    sequence, head = pl.program_id(0), pl.program_id(1)
    program = sequence * pl.num_programs(1) + head
    first, each, end = context_ranges(fixed, tuning, length_ref[0])
    row = jnp.arange(fixed.decode_rows, dtype=jnp.int32)

    def step(split, state):
        place = (program * tuning.max_splits + split) * fixed.group + row
        top, total, acc = state
        split_top = top_ref[place]
        new_top = jnp.maximum(top, split_top)
        keep, weight = jnp.exp2(top - new_top), jnp.exp2(split_top - new_top)
        merged = tuple(
            old * keep[:, None] + load_rows(acc_ref, (place,), *part) * weight[:, None]
            for part, old in zip(fixed.result_parts, acc, strict=True)
        )
        return new_top, total * keep + total_ref[place] * weight, merged

    splits = pl.cdiv(end - first, each)
    state = lax.fori_loop(0, splits, step, empty_state(fixed, row.shape[0]))
    # Rows past the group are not stored, but their places must exist and differ.
    place = lax.rem(program * fixed.group + row, out_ref.shape[0])
    store_result(fixed, out_ref, place, state, row < fixed.group)


def paged_decode(
    qkv: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    *,
    dtype: str,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: str = "float32",
    capability: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the last token of each context.

    Args:
      qkv: [S, K, G + 2, D]: of each KV head its queries, then its key and its value, which are not read.
      k_pool, v_pool: [N, K, P, D] of `dtype`, or int8 or float8_e4m3fn.
      tables: int32 [S, M]; every entry is a valid block id.
      context_lens: int32 [S]; 0 gives zeros.
      dtype: of the operands of products; sums are float32.
      k_scale, v_scale: [N, K, P], what a stored value is multiplied by; for 8-bit pools.
      window, soft_cap: as in `ops.attention_xla.attend_tiles`.
      out_dtype: what the float32 result is rounded to as it is stored.
      capability: of the GPU, as 10 * major + minor.

    Returns:
      `out_dtype` [S, H, D].

    Raises:
      ValueError: shapes or dtypes that the kernel does not handle.
    """
    fixed, pools = check_attention(
        qkv,
        k_pool,
        v_pool,
        k_scale,
        v_scale,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
        capability=capability,
    )
    num_seqs, kv_heads, _, head_dim = qkv.shape
    num_heads, qkv_rows = kv_heads * fixed.group, kv_heads * fixed.head_rows
    width = tables.shape[1]
    tuning = cap_splits(tuning or default_tuning(fixed), width)
    # One tile of rows more than there are: where the last program's rows past its group would lie.
    partial = num_seqs * kv_heads * tuning.max_splits * fixed.group + fixed.decode_rows
    length_spec = pl.BlockSpec((1,), lambda s, *_: (s,))
    scratch = [
        jax.ShapeDtypeStruct((partial, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((partial,), jnp.float32),
        jax.ShapeDtypeStruct((partial,), jnp.float32),
    ]
    partials = pl.pallas_call(
        functools.partial(_split_kernel, fixed=fixed, tuning=tuning),
        grid=(num_seqs, kv_heads, tuning.max_splits),
        in_specs=[
            pl.BlockSpec((None, qkv_rows, head_dim), lambda s, h, x: (s, 0, 0)),
            *pool_specs(pools, head_axis=1),
            pl.BlockSpec((None, width), lambda s, h, x: (s, 0)),
            length_spec,
        ],
        out_specs=[whole(x.shape) for x in scratch],
        out_shape=scratch,
        compiler_params=triton.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(qkv.reshape(num_seqs, qkv_rows, head_dim), *pools, tables, context_lens)
    merged_rows = max(num_seqs * num_heads, fixed.decode_rows)
    merged_shape = jax.ShapeDtypeStruct((merged_rows, head_dim), out_dtype)
    out = pl.pallas_call(
        functools.partial(_merge_kernel, fixed=fixed, tuning=tuning),
        grid=(num_seqs, kv_heads),
        in_specs=[length_spec, *(whole(x.shape) for x in scratch)],
        out_specs=whole(merged_shape.shape),
        out_shape=merged_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_merge",
    )(context_lens, *partials)
    return out[: num_seqs * num_heads].reshape(num_seqs, num_heads, head_dim)
