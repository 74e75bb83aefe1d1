"""Paged attention of one token per sequence in Pallas Mosaic GPU, for Hopper.

A program reduces one range of a context for one KV head. The blocks that the table names come in by
bulk copies (TMA) through a ring in shared memory, so that loads need no registers and run tiles
ahead. The arithmetic is float32 on the ordinary cores, without wgmma: decoding is bound by memory,
and the interpreter can check this form. The 16 slots of a block keep a softmax each, merged once
at the end: no maximum or sum crosses lanes between tiles, scores aside. Contexts are cut into
ranges as in `pallas.decode`, and the ranges are merged by XLA.

Seen on jax 0.10.2 and 0.12.0: right in jax's GPU interpreter, which finds no races; compiles for
sm_90a without spills, to 224 registers at head_dim 128 and groups of 4. Never run on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jpaged.pallas.common import (
    LOG2_E,
    NEVER,
    Attention,
    cap_splits,
    check_attention,
    context_ranges,
    merge_ranges,
    scale_queries,
)

HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float32")
BLOCK_SIZE = 16
GROUP_HEADS = 4  # query heads whose state the registers of one warpgroup hold
MAX_GROUP = 2 * GROUP_HEADS


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
      tile_blocks: blocks per step of the online softmax.
      tiles: tiles in the ring, at least 2; `tiles * tile_blocks` is at most 32.
      split_blocks: least blocks of context per range, a multiple of `tile_blocks`.
      max_splits: most ranges of a context.
    """

    tile_blocks: int
    tiles: int
    split_blocks: int
    max_splits: int

    def __post_init__(self) -> None:
        if self.tiles < 2 or self.slots > 32:
            raise ValueError(f"{self.tiles=} must be at least 2, and {self.slots=} at most 32")
        if self.split_blocks % self.tile_blocks:
            raise ValueError(f"{self.split_blocks=} must be a multiple of {self.tile_blocks=}")

    @property
    def slots(self) -> int:
        """Blocks that the ring holds."""
        return self.tiles * self.tile_blocks


def default_tuning(fixed: Attention) -> Tuning:
    """About 96 KiB of ring, so that two programs share a multiprocessor; ranges of 512 tokens."""
    block_bytes = 2 * BLOCK_SIZE * fixed.head_dim * jnp.dtype(fixed.dtype).itemsize  # K and V
    tile_blocks = 4 if block_bytes <= 8192 else 2
    tiles = min(32, 98304 // block_bytes) // tile_blocks
    return Tuning(tile_blocks=tile_blocks, tiles=tiles, split_blocks=32, max_splits=16)


def _tile_layout(fixed: Attention) -> Any:
    """[16, D] over a warpgroup: 4 slots a warp, 8 lanes a slot, 16 bytes of a stored row a lane."""
    vector = 16 // jnp.dtype(fixed.dtype).itemsize
    return plgpu.Layout.TILED(
        plgpu.Tiling(((BLOCK_SIZE, 8 * vector), (4, 8 * vector), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _column_layout(fixed: Attention) -> Any:
    """[16, D] over a warpgroup: a lane has all slots of a column; at D = 64 two warps have the same."""
    warps = fixed.head_dim // 32
    copies = (plgpu.Replicated(4 // warps),) if warps < 4 else ()
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, fixed.head_dim), (32,), (1,))),
        warp_dims=(-3, *copies),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _kernel(
    q_ref,  # [S, H, D]
    k_ref,  # [N, K, P, D]
    v_ref,
    table_ref,  # [S, M]
    length_ref,  # [S]
    out_ref,  # [S, H, X, D]
    lse_ref,  # [S, H, X]
    queries_ref,  # [G, D]
    k_ring,  # [slots, P, D]
    v_ring,
    acc_ref,  # [W, P, D]
    top_ref,  # [W, P]
    total_ref,  # [W, P]
    asked,  # a barrier: the queries have come
    ready,  # a barrier per slot: its block has come
    done,  # a barrier per tile of the ring: all warpgroups have read it
    *,
    fixed: Attention,
    tuning: Tuning,
    heads: int,
    interpret: bool,
):
    sequence, kv_head, split = (lax.axis_index(name) for name in ("sequence", "head", "split"))
    warpgroup = lax.axis_index("warpgroup")
    tile_blocks, group = tuning.tile_blocks, fixed.group
    shape = (BLOCK_SIZE, fixed.head_dim)
    length = length_ref[sequence]
    first, each, end = context_ranges(fixed, tuning, length)
    begin = first + split * each
    end = jnp.minimum(begin + each, end)
    layout, columns = _tile_layout(fixed), _column_layout(fixed)

    def place(x: jax.Array, where: Any) -> jax.Array:
        return x if interpret else plgpu.layout_cast(x, where)

    def spread(x: jax.Array, axis: int, where: Any = layout) -> jax.Array:
        """[P] or [D] along `axis` of a tile [P, D]."""
        return place(lax.broadcast_in_dim(x, shape, (axis,)), where)

    def save(ref, x: jax.Array) -> None:
        """Stores a tile; rows of float32 conflict in the banks, which later versions of jax ask to allow."""
        if interpret or not hasattr(plgpu, "store"):
            ref[...] = x
        else:
            plgpu.store(ref, x, optimized=False)

    def fetch(tile: jax.Array) -> None:
        """Starts the copies of what blocks there are of a tile."""
        for i in range(tile_blocks):
            index = tile * tile_blocks + i
            block = begin + index

            @pl.when(block < end)
            def _(index=index, block=block):
                slot = lax.rem(index, tuning.slots)
                stored = table_ref[sequence, block]
                plgpu.copy_gmem_to_smem(k_ref.at[stored, kv_head], k_ring.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[stored, kv_head], v_ring.at[slot], ready.at[slot])

    @pl.when(begin < end)
    def _():
        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[sequence, pl.ds(kv_head * group, group)], queries_ref, asked)
            for tile in range(tuning.tiles):
                fetch(jnp.int32(tile))

        own = [jnp.minimum(warpgroup * heads + i, group - 1) for i in range(heads)]
        plgpu.barrier_wait(asked)
        q = []
        for head in own:
            row = place(queries_ref[head], layout.reduce(0)).astype(jnp.float32)
            q.append(spread(row * LOG2_E if fixed.soft_cap is None else row, 1))

        def step(index, num_blocks: int, state, *, masked: bool):
            """`num_blocks` blocks from the `index`th of the range."""
            slots = [lax.rem(index + i, tuning.slots) for i in range(num_blocks)]
            scores: list[list[jax.Array]] = [[] for _ in range(heads)]
            written = []
            for i, slot in enumerate(slots):
                plgpu.barrier_wait(ready.at[slot])
                keys = place(k_ring[slot], layout).astype(jnp.float32)
                if masked:
                    start = (begin + index + i) * BLOCK_SIZE
                    position = start + place(
                        lax.broadcasted_iota(jnp.int32, (BLOCK_SIZE,), 0), layout.reduce(1)
                    )
                    written.append(position < length)
                    seen = written[i]
                    if fixed.window is not None:
                        seen = seen & (position >= length - fixed.window)
                for head in range(heads):
                    score = jnp.sum(keys * q[head], axis=1)
                    if fixed.soft_cap is not None:
                        score = (fixed.soft_cap * LOG2_E) * jnp.tanh(score * (1 / fixed.soft_cap))
                    scores[head].append(jnp.where(seen, score, -jnp.inf) if masked else score)
            updated = []
            weights = []
            for head, (top, total, acc) in enumerate(state):
                new_top = functools.reduce(jnp.maximum, scores[head], top)
                keep = jnp.exp2(top - new_top)
                weights.append([jnp.exp2(score - new_top) for score in scores[head]])
                updated.append((new_top, sum(weights[head], total * keep), acc * spread(keep, 0)))
            for i, slot in enumerate(slots):
                values = place(v_ring[slot], layout).astype(jnp.float32)
                if masked:
                    values = jnp.where(spread(written[i], 0), values, 0.0)
                for head, (top, total, acc) in enumerate(updated):
                    updated[head] = (top, total, acc + spread(weights[head][i], 0) * values)
            return tuple(updated)

        def tile(number, state):
            # The tile before this one is read: its place in the ring takes the next to come.
            @pl.when((warpgroup == 0) & (number > 0))
            def _():
                plgpu.barrier_wait(done.at[lax.rem(number - 1, tuning.tiles)])
                fetch(number - 1 + tuning.tiles)

            state = step(number * tile_blocks, tile_blocks, state, masked=fixed.window is not None)
            plgpu.commit_smem()  # what was read here is read before a bulk copy overwrites it
            plgpu.barrier_arrive(done.at[lax.rem(number, tuning.tiles)])
            return state

        empty = (
            place(jnp.full((BLOCK_SIZE,), NEVER, jnp.float32), layout.reduce(1)),
            place(jnp.zeros((BLOCK_SIZE,), jnp.float32), layout.reduce(1)),
            place(jnp.zeros(shape, jnp.float32), layout),
        )
        # Whole tiles of whole blocks, then what is left block by block.
        tiles = lax.div(jnp.minimum(end, lax.div(length, BLOCK_SIZE)) - begin, tile_blocks)
        state = lax.fori_loop(0, tiles, tile, (empty,) * heads)

        # Who has waited for one phase of a barrier waits for all, the interpreter asks.
        @pl.when((warpgroup == 0) & (tiles > 0))
        def _():
            plgpu.barrier_wait(done.at[lax.rem(tiles - 1, tuning.tiles)])

        state = lax.fori_loop(
            tiles * tile_blocks, end - begin, lambda i, state: step(i, 1, state, masked=True), state
        )

        for i, (top, total, acc) in enumerate(state):
            top_ref[warpgroup] = top
            total_ref[warpgroup] = total
            save(acc_ref.at[warpgroup], acc)
            tops = place(top_ref[warpgroup], columns.reduce(1))
            most = jnp.max(tops)
            scale = jnp.exp2(tops - most)
            weight = jnp.sum(scale * place(total_ref[warpgroup], columns.reduce(1)))
            merged = jnp.sum(spread(scale, 0, columns) * place(acc_ref[warpgroup], columns), axis=0)

            @pl.when(warpgroup * heads + i < group)
            def _(head=kv_head * group + own[i], merged=merged, most=most, weight=weight):
                out_ref[sequence, head, split] = merged / weight
                lse_ref[sequence, head, split] = most + jnp.log2(weight)


def paged_decode_mosaic(
    qkv: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    *,
    dtype: str,
    window: int | None = None,
    soft_cap: float | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the last token of each context.

    Args:
      qkv: [S, K, G + 2, D]: of each KV head its queries, then its key and its value, which are not read.
      k_pool, v_pool: [N, K, 16, D] of `dtype`.
      tables: int32 [S, M]; entries past a context are not read.
      context_lens: int32 [S]; 0 gives zeros.
      dtype: bfloat16 or float32; queries are rounded to it, sums and weights are float32.
      window, soft_cap: as in `ops.attention_xla.attend_tiles`.
      interpret: run on the CPU.

    Returns:
      float32 [S, H, D].

    Raises:
      ValueError: shapes or dtypes that the kernel does not handle.
    """
    problem = unsupported(
        head_dim=qkv.shape[3], block_size=k_pool.shape[2], dtype=dtype, group=qkv.shape[2] - 2
    )
    if problem:
        raise ValueError(problem)
    if k_pool.dtype != dtype:
        raise ValueError(f"{k_pool.dtype=} must be {dtype=} for the Mosaic kernel")
    fixed, (k_pool, v_pool) = check_attention(
        qkv, k_pool, v_pool, None, None, dtype=dtype, window=window, soft_cap=soft_cap, capability=90
    )
    num_seqs, kv_heads, _, head_dim = qkv.shape
    num_heads = kv_heads * fixed.group
    q = scale_queries(fixed, qkv[:, :, :-2]).reshape(num_seqs, num_heads, head_dim)
    tuning = cap_splits(tuning or default_tuning(fixed), tables.shape[1])
    splits = tuning.max_splits
    warpgroups = -(-fixed.group // GROUP_HEADS)
    heads = -(-fixed.group // warpgroups)
    ring = plgpu.SMEM((tuning.slots, BLOCK_SIZE, head_dim), jnp.dtype(dtype))
    out, lse = plgpu.kernel(
        functools.partial(_kernel, fixed=fixed, tuning=tuning, heads=heads, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((num_seqs, num_heads, splits, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_seqs, num_heads, splits), jnp.float32),
        ),
        grid=(num_seqs, kv_heads, splits),
        grid_names=("sequence", "head", "split"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((fixed.group, head_dim), jnp.dtype(dtype)),
            ring,
            ring,
            plgpu.SMEM((warpgroups, BLOCK_SIZE, head_dim), jnp.float32),
            plgpu.SMEM((warpgroups, BLOCK_SIZE), jnp.float32),
            plgpu.SMEM((warpgroups, BLOCK_SIZE), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=tuning.slots),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=tuning.tiles),
        ),
        kernel_name="paged_decode_mosaic",
        interpret=_interpreter() if interpret else None,
    )(q, k_pool, v_pool, tables, context_lens)
    return merge_ranges(fixed, tuning, context_lens, out, lse)


def unsupported(*, head_dim: int, block_size: int, dtype: str, group: int) -> str | None:
    """Why the kernel cannot run a model of these shapes, or `None`."""
    if head_dim not in HEAD_DIMS:
        return f"{head_dim=} must be one of {HEAD_DIMS} for the Mosaic kernel"
    if block_size != BLOCK_SIZE:
        return f"{block_size=} must be {BLOCK_SIZE} for the Mosaic kernel"
    if dtype not in DTYPES:
        return f"{dtype=} must be one of {DTYPES} for the Mosaic kernel"
    if group > MAX_GROUP:
        return f"{group=} query heads per KV head must be at most {MAX_GROUP} for the Mosaic kernel"
    return None


def _interpreter() -> Any:
    # The only way to ask for it: jax exports these parameters nowhere else.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
