"""Paged attention of one token per sequence as a plain Triton kernel, called through jax-triton.

The split over the context is that of `pallas.decode`; XLA merges the ranges. Offsets into a pool have
64 bits, and a head_dim that is no power of two is padded in registers. Pools of 8 bits are left to
`pallas.decode`.

Seen with jax 0.10.2, jax-triton 0.3.1 and triton 3.6: compiles for sm_80, sm_89 and sm_90a without
spills; right in float32 and float16 in Triton's interpreter, whose bfloat16 products are wrong.
Never run on a GPU. With triton 3.9 it lowers to PTX 9.4, which CUDA 12's ptxas does not read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas.common import (
    LOG2_E,
    NEVER,
    Attention,
    cap_splits,
    check_attention,
    merge_ranges,
    scale_queries,
)
from jpaged.pallas.decode import Tuning, default_tuning

INSTALL = "pip install 'jpaged[cuda12]', with jax 0.10.2, jax-triton 0.3.1 and triton 3.6"


@functools.cache
def triton_kernel() -> Any:
    """The Triton function, made where Triton is installed.

    Raises:
      ImportError: without triton; the message names what to install.
    """
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise ImportError(f"This kernel needs triton: {INSTALL}") from error

    @triton.jit
    def paged_decode(
        q,  # [S, K * group, head_dim]
        k,  # [N, K, block_size, head_dim]
        v,
        table,  # [S, width]
        lengths,  # [S]
        out,  # float32 [S, K * group, splits, head_dim]
        lse,  # float32 [S, K * group, splits]
        width: tl.constexpr,
        group: tl.constexpr,
        rows: tl.constexpr,
        head_dim: tl.constexpr,
        columns: tl.constexpr,
        block_size: tl.constexpr,
        tile_blocks: tl.constexpr,
        split_blocks: tl.constexpr,
        window: tl.constexpr,
        soft_cap: tl.constexpr,
        precision: tl.constexpr,
        log2_e: tl.constexpr,
        never: tl.constexpr,
    ):
        sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
        tile: tl.constexpr = tile_blocks * block_size
        length = tl.load(lengths + sequence)
        first = 0
        if window is not None:
            first = tl.maximum(length - window, 0) // block_size
        end = tl.cdiv(length, block_size)
        each = tl.maximum(tl.cdiv(end - first, splits * tile_blocks) * tile_blocks, split_blocks)
        begin = (first + split * each) * block_size
        stop = tl.minimum(begin + each * block_size, length)
        if begin >= stop:
            return

        row = tl.arange(0, rows)
        column = tl.arange(0, columns)
        head = (sequence * kv_heads + kv_head) * group + row
        inside = column < head_dim
        own = (row < group)[:, None] & inside[None, :]
        queries = tl.load(q + head[:, None] * head_dim + column[None, :], mask=own, other=0.0)

        top = tl.full((rows,), never, tl.float32)
        total = tl.zeros((rows,), tl.float32)
        acc = tl.zeros((rows, columns), tl.float32)
        for start in range(begin, stop, tile):
            position = start + tl.arange(0, tile)
            seen = position < stop
            if window is not None:
                seen = seen & (position >= length - window)
            block = tl.load(table + sequence * width + position // block_size, mask=seen, other=0)
            slot = (block.to(tl.int64) * kv_heads + kv_head) * block_size + position % block_size
            offset = slot[:, None] * head_dim + column[None, :]
            stored = seen[:, None] & inside[None, :]
            keys = tl.load(k + offset, mask=stored, other=0.0)
            values = tl.load(v + offset, mask=stored, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
            if soft_cap is None:
                scores = scores * log2_e
            else:
                # tanh by exp2, finite for every finite score.
                small = tl.exp2(tl.abs(scores) * (-2 * log2_e / soft_cap))
                tanh = tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
                scores = tanh * (soft_cap * log2_e)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_top[:, None])
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(weights, axis=1)
            acc = acc * keep[:, None]
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=precision)
            top = new_top

        place = head * splits + split
        tl.store(out + place[:, None] * head_dim + column[None, :], acc / total[:, None], mask=own)
        tl.store(lse + place, top + tl.log2(total), mask=row < group)

    return paged_decode


def kernel_constants(fixed: Attention, tuning: Tuning, width: int) -> dict[str, Any]:
    """What the Triton function takes by name, for block tables of `width` columns."""
    return dict(
        width=width,
        group=fixed.group,
        rows=fixed.decode_rows,
        head_dim=fixed.head_dim,
        columns=1 << (fixed.head_dim - 1).bit_length(),
        block_size=fixed.block_size,
        tile_blocks=tuning.tile_blocks,
        split_blocks=tuning.split_blocks,
        window=fixed.window,
        soft_cap=fixed.soft_cap,
        precision="ieee" if fixed.dtype == "float32" else "tf32",  # of float32 products only
        log2_e=LOG2_E,
        never=NEVER,
    )


def paged_decode_jax_triton(
    qkv: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    *,
    dtype: str,
    window: int | None = None,
    soft_cap: float | None = None,
    capability: int,
    tuning: Tuning | None = None,
) -> jax.Array:
    """Attention of the last token of each context.

    Args:
      qkv: [S, K, G + 2, D]: of each KV head its queries, then its key and its value, which are not read.
      k_pool, v_pool: [N, K, P, D] of `dtype`.
      tables: int32 [S, M]; entries past a context are not read.
      context_lens: int32 [S]; 0 gives zeros.
      dtype: of the operands of products; sums are float32.
      window, soft_cap: as in `ops.attention_xla.attend_tiles`.
      capability: of the GPU, as 10 * major + minor.

    Returns:
      float32 [S, H, D].

    Raises:
      ImportError: without jax-triton or triton; the message names what to install.
      ValueError: shapes or dtypes that the kernel does not handle.
    """
    if k_pool.dtype != dtype:
        raise ValueError(f"{k_pool.dtype=} must be {dtype=} for the jax-triton kernel")
    fixed, (k_pool, v_pool) = check_attention(
        qkv, k_pool, v_pool, None, None, dtype=dtype, window=window, soft_cap=soft_cap, capability=capability
    )
    kernel = triton_kernel()
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(f"This kernel needs jax-triton: {INSTALL}") from error
    num_seqs, kv_heads, _, head_dim = qkv.shape
    num_heads = kv_heads * fixed.group
    q = scale_queries(fixed, qkv[:, :, :-2]).reshape(num_seqs, num_heads, head_dim)
    tuning = cap_splits(tuning or default_tuning(fixed), tables.shape[1])
    out, lse = jax_triton.triton_call(
        q,
        k_pool,
        v_pool,
        tables,
        context_lens,
        kernel=kernel,
        name="paged_decode_jax_triton",
        out_shape=(
            jax.ShapeDtypeStruct((num_seqs, num_heads, tuning.max_splits, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_seqs, num_heads, tuning.max_splits), jnp.float32),
        ),
        grid=(num_seqs, kv_heads, tuning.max_splits),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        compute_capability=capability,
        **kernel_constants(fixed, tuning, tables.shape[1]),
    )
    return merge_ranges(fixed, tuning, context_lens, out, lse)
