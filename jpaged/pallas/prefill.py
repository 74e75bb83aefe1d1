"""Causal paged attention of ragged chunks of many sequences in one launch.

A query tile holds `tile_rows` rows of one sequence and one KV head; a row is one query head of one
token, the G heads of a token side by side, so that they share every key that is read. Every key,
the chunk's own included, comes from the pool. Tiles of context begin at multiples of their size
from position 0: a row's sum has one order whatever the chunk or the batch (online softmax as in
flash attention: Dao et al. 2022).
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
    check_attention,
    empty_state,
    load_queries,
    pool_specs,
    softmax_step,
    store_result,
    whole,
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the prefill kernel is cut.

    Attributes:
      tile_rows: rows of a query tile, a power of two of at least 16.
      tile_blocks: blocks of context per iteration, a power of two.
      num_warps, num_stages: as Triton means them.
    """

    tile_rows: int
    tile_blocks: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.tile_rows < 16 or self.tile_rows & (self.tile_rows - 1):
            raise ValueError(f"{self.tile_rows=} must be a power of two of at least 16")
        if self.tile_blocks & (self.tile_blocks - 1):
            raise ValueError(f"{self.tile_blocks=} must be a power of two")


def default_tuning(fixed: Attention) -> Tuning:
    """The largest tiles whose accumulators stay in registers on every target.

    A tile of K or V has at least 16 bytes for each thread, and so is loaded in pieces of no less.
    """
    wide = fixed.head_dim > 128
    masked = fixed.window is not None or fixed.soft_cap is not None
    hopper = fixed.capability >= 90
    warps = 8
    if fixed.dtype == "float32" and wide:
        rows, tokens, stages, warps = 16, 16, 2, 4
    elif fixed.dtype == "float32":
        rows, tokens, stages = 64, 32, 2
    elif wide and fixed.quantized:
        rows, tokens, stages = (16, 32, 2) if fixed.packed_values else (16, 16, 1)
    elif wide:
        rows, tokens, stages = 32 if masked else 64, 32, 2
    elif fixed.packed_values:
        rows, tokens, stages, warps = 32, 64, 3, 4 if fixed.head_dim == 64 else 8
    elif fixed.quantized:
        rows, tokens, stages = 64, 64 if fixed.head_dim == 64 else 32, 3
    elif fixed.is_padded:
        rows, tokens, stages = (64, 32 if masked else 64, 3) if hopper else (32, 32, 3)
    elif not hopper:
        rows, tokens, stages = 64, 64, 2
    elif masked:
        rows, tokens, stages = 64, 32, 3
    else:  # products of a whole warpgroup, from Hopper on, need fewer registers
        rows, tokens, stages = 128, 64, 3
    return Tuning(rows, max(1, tokens // fixed.block_size), num_warps=warps, num_stages=stages)


def query_tiles(
    query_start: jax.Array, num_tokens: int, group: int, tile_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Which sequence each query tile belongs to, and its first row there.

    Args:
      query_start: int32 [X + 1], cumulative; covers all T tokens.

    Returns:
      int32 [B] each. A tile past the last of its sequence has no rows.
    """
    num_seqs = query_start.shape[0] - 1
    num_tiles = pl.cdiv(num_tokens * group, tile_rows) + min(num_seqs, num_tokens)
    tiles = pl.cdiv((query_start[1:] - query_start[:-1]) * group, tile_rows)  # [X]
    end = jnp.cumsum(tiles)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(end[None, :] <= tile[:, None], axis=1), num_seqs - 1).astype(jnp.int32)
    return sequence, (tile - (end - tiles)[sequence]) * tile_rows


def _kernel(*refs, fixed: Attention, tuning: Tuning, kv_heads: int):
    qkv_ref, *pool_refs, table_ref, start_ref, length_ref, sequence_ref, first_row_ref, out_ref = refs
    head = pl.program_id(1)
    group, tile_len = fixed.group, tuning.tile_blocks * fixed.block_size
    sequence, first_row = sequence_ref[0], first_row_ref[0]
    start = start_ref[sequence]
    queries = start_ref[sequence + 1] - start
    length = length_ref[sequence]
    begin = length - queries  # position of the chunk's first token

    @pl.when(first_row < queries * group)
    def _():
        row = first_row + jnp.arange(tuning.tile_rows, dtype=jnp.int32)  # [R]
        real = row < queries * group
        token = jnp.where(real, row, 0) // group
        q = load_queries(fixed, qkv_ref, ((start + token) * kv_heads + head) * fixed.head_rows + row % group)
        position = jnp.where(real, begin + token, -1)

        def tile(index, state, *, masked: bool):
            ids = table_ref[sequence, pl.ds(index * tuning.tile_blocks, tuning.tile_blocks)]
            if not masked:
                return softmax_step(fixed, pool_refs, ids, q, state)
            key = index * tile_len + jnp.arange(tile_len, dtype=jnp.int32)  # [C]
            seen = key[None, :] <= position[:, None]
            if fixed.window is not None:
                seen &= key[None, :] > position[:, None] - fixed.window
            return softmax_step(fixed, pool_refs, ids, q, state, seen=seen, written=key < length)

        first = begin + first_row // group  # position of the first row, then of the last
        last = begin + jnp.minimum((first_row + tuning.tile_rows - 1) // group, queries - 1)
        tiles = pl.cdiv(jnp.maximum(last + 1, 0), tile_len)
        state = empty_state(fixed, tuning.tile_rows)
        if fixed.window is None:
            # Tiles that every row sees whole need no mask.
            whole_tiles = jnp.minimum(jnp.maximum(first + 1, 0) // tile_len, tiles)
            state = lax.fori_loop(0, whole_tiles, functools.partial(tile, masked=False), state)
        else:
            whole_tiles = jnp.maximum(first - fixed.window + 1, 0) // tile_len
        state = lax.fori_loop(whole_tiles, tiles, functools.partial(tile, masked=True), state)
        place = ((start + row // group) * kv_heads + head) * group + row % group
        store_result(fixed, out_ref, place, state, real)


def paged_prefill(
    qkv: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    query_start: jax.Array,
    context_lens: jax.Array,
    *,
    dtype: str,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    capability: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of packed tokens over their contexts.

    Args:
      qkv: [T, K, G + 2, D].
      query_start: int32 [S + 1], cumulative from 0; sequence s has the packed tokens
        [query_start[s], query_start[s + 1]), the last ones of its context.
      context_lens: int32 [S], tokens in the pool, this step's included.
      Others as in `paged_decode`.

    Returns:
      float32 [T, H, D]; zeros for tokens past `query_start[S]`.

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
    num_tokens, kv_heads, _, head_dim = qkv.shape
    num_heads = kv_heads * fixed.group
    tuning = tuning or default_tuning(fixed)
    # Padding is one more sequence, without a context. No tile of context overhangs the table.
    query_start = jnp.append(query_start, num_tokens)
    context_lens = jnp.append(context_lens, 0)
    tables = jnp.pad(tables, ((0, 1), (0, -tables.shape[1] % tuning.tile_blocks)))
    sequence, first_row = query_tiles(query_start, num_tokens, fixed.group, tuning.tile_rows)
    per_tile = pl.BlockSpec((1,), lambda tile, head: (tile,))
    # Rows past a tile's own are not stored, but their places must exist.
    out_shape = jax.ShapeDtypeStruct(((num_tokens + tuning.tile_rows) * num_heads, head_dim), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, fixed=fixed, tuning=tuning, kv_heads=kv_heads),
        grid=(sequence.shape[0], kv_heads),
        in_specs=[
            whole((num_tokens * kv_heads * fixed.head_rows, head_dim)),
            *pool_specs(pools, head_axis=1),
            whole(tables.shape),
            whole(query_start.shape),
            whole(context_lens.shape),
            per_tile,
            per_tile,
        ],
        out_specs=whole(out_shape.shape),
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(qkv.reshape(-1, head_dim), *pools, tables, query_start, context_lens, sequence, first_row)
    return out[: num_tokens * num_heads].reshape(num_tokens, num_heads, head_dim)
