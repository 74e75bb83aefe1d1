"""What the attention kernels share: argument checks, loads from the pool, and one softmax step.

Tiles are padded in registers, never in the pool: a Triton tile holds a power of two, so a head_dim that
is none (80) is loaded as the next one that is (128), and what is past its end is masked: no memory is
read there.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.config import ModelConfig

LOG2_E = 1.4426950408889634
NEVER = -1e30  # initial maximum: finite, so that exp2(-inf - NEVER) is 0 and not NaN
MIN_ROWS = 16  # least rows of a tensor-core product
MAX_POOL_ENTRIES = 2**31 - 1  # kernels compute offsets into a pool in 32 bits

MIN_FP8_CAPABILITY = 89

HEAD_DIMS = (64, 80, 96, 128, 256)
OPERAND_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Attention:
    """What is fixed when an attention kernel is traced.

    Attributes:
      group: G, query heads per KV head.
      head_dim: D.
      block_size: P.
      dtype: of the operands of products.
      quantized: pools hold values of 8 bits or fewer, with a scale per token and head beside them.
      packed_values: V's pool has two 4-bit values in a byte, of dimensions i and i + D/2.
      capability: of the GPU, 10 * major + minor.
      window, soft_cap: as in `ops.attention_xla.attend_tiles`.
    """

    group: int
    head_dim: int
    block_size: int
    dtype: str
    quantized: bool
    packed_values: bool
    capability: int
    window: int | None
    soft_cap: float | None

    @property
    def head_rows(self) -> int:
        """Rows of a KV head in qkv [T, K, G + 2, D]: its queries, its key, its value."""
        return self.group + 2

    @property
    def decode_rows(self) -> int:
        """Rows of a tile that holds the query heads of one KV head."""
        return max(MIN_ROWS, 1 << (self.group - 1).bit_length())

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of the columns that are loaded together; the last part may overhang head_dim.

        Float32 products run without tensor cores, and each thread holds whole rows of its operands:
        parts of 32 keep those in registers.
        """
        return self._cut(self.head_dim)

    @property
    def value_parts(self) -> tuple[tuple[int, int], ...]:
        """`parts` of the columns in which V's pool holds a token."""
        return self._cut(self.head_dim // 2) if self.packed_values else self.parts

    @property
    def result_parts(self) -> tuple[tuple[int, int, int], ...]:
        """(offset, size, end) of the columns of each accumulator: those from `end` on are padding."""
        if not self.packed_values:
            return tuple((*part, self.head_dim) for part in self.parts)
        half = self.head_dim // 2
        both = (((offset, size, half), (half + offset, size, 2 * half)) for offset, size in self.value_parts)
        return tuple(part for pair in both for part in pair)

    @property
    def value_row_bytes(self) -> int:
        """Bytes of a token in the first of `value_parts`, with padding."""
        size = self.value_parts[0][1]
        return size if self.quantized else size * jnp.dtype(self.dtype).itemsize

    def _cut(self, width: int) -> tuple[tuple[int, int], ...]:
        size = 32 if self.dtype == "float32" else 1 << (width - 1).bit_length()
        return tuple((offset, size) for offset in range(0, width, size))

    @property
    def is_padded(self) -> bool:
        """Whether the last part overhangs head_dim."""
        return sum(self.parts[-1]) > self.head_dim

    @property
    def precision(self) -> lax.Precision | None:
        # A float32 product on a GPU is tf32 unless asked otherwise.
        return lax.Precision.HIGHEST if self.dtype == "float32" else None


def check_attention(
    qkv: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    dtype: str,
    window: int | None,
    soft_cap: float | None,
    capability: int,
) -> tuple[Attention, list[jax.Array]]:
    """Checks the arguments that decode and prefill share.

    Returns:
      The fixed part, and the pools (and scales) as the kernel takes them.

    Raises:
      ValueError: shapes or dtypes that no kernel handles; the message names both.
    """
    _, heads, rows, head_dim = qkv.shape
    num_blocks, kv_heads, block_size, _ = k_pool.shape
    slots = (num_blocks, kv_heads, block_size)
    packed_values = k_pool.dtype == jnp.int8 and v_pool.dtype == jnp.uint8
    value_width = head_dim // 2 if packed_values else head_dim
    if (
        k_pool.shape != (*slots, head_dim)
        or v_pool.shape != (*slots, value_width)
        or not (packed_values or k_pool.dtype == v_pool.dtype)
    ):
        raise ValueError(
            f"{k_pool.shape=} {k_pool.dtype=} must match {v_pool.shape=} {v_pool.dtype=} and {head_dim=}"
        )
    if heads != kv_heads or rows < 3:
        raise ValueError(f"{qkv.shape=} must be [tokens, {kv_heads=}, query heads of each + 2, {head_dim=}]")
    problem = unsupported(head_dim=head_dim, block_size=block_size, dtype=dtype)
    if problem:
        raise ValueError(problem)
    check_pool_size(k_pool)
    quantized = str(k_pool.dtype) in QUANTIZED_DTYPES
    if not quantized and k_pool.dtype != dtype:
        raise ValueError(f"{k_pool.dtype=} must be {dtype=} or one of {QUANTIZED_DTYPES}")
    pools = [k_pool, v_pool]
    if str(k_pool.dtype) == "float8_e4m3fn" and capability < MIN_FP8_CAPABILITY:
        pools = [lax.bitcast_convert_type(pool, jnp.uint8) for pool in pools]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        expected = slots if quantized else None
        if (None if scale is None else scale.shape) != expected:
            raise ValueError(f"{name} of a {k_pool.dtype} pool must have the shape {expected}, got {scale}")
        if scale is not None:
            pools.append(scale)
    fixed = Attention(
        group=rows - 2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        quantized=quantized,
        packed_values=packed_values,
        capability=capability,
        window=window,
        soft_cap=soft_cap,
    )
    return fixed, pools


def addressable_blocks(config: ModelConfig, block_size: int) -> int:
    """Blocks of a layer's pool whose offsets fit 32 bits, the null block included."""
    return MAX_POOL_ENTRIES // (config.num_kv_heads * block_size * config.head_dim)


def check_pool_size(k_pool: jax.Array) -> None:
    """Raises `ValueError` for a pool whose offsets do not fit 32 bits."""
    if k_pool.size > MAX_POOL_ENTRIES:
        raise ValueError(f"{k_pool.size=} must be at most {MAX_POOL_ENTRIES}: offsets have 32 bits")


def unsupported(*, head_dim: int, block_size: int, dtype: str) -> str | None:
    """Why the kernels cannot run a model of these shapes, or `None`."""
    if head_dim not in HEAD_DIMS:
        return f"{head_dim=} must be one of {HEAD_DIMS} for the GPU kernels"
    if block_size not in (16, 32, 64):
        return f"{block_size=} must be 16, 32 or 64 for the GPU kernels"
    if dtype not in OPERAND_DTYPES:
        return f"{dtype=} must be one of {OPERAND_DTYPES}"
    return None


def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Every program sees the whole array."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def pool_specs(pools: list[jax.Array], head_axis: int) -> list[pl.BlockSpec]:
    """A program sees all blocks of its KV head: pools [N, K, P, D], then scales [N, K, P].

    Args:
      head_axis: which axis of the grid runs over the KV heads.
    """

    def spec(pool: jax.Array) -> pl.BlockSpec:
        num_blocks, _, *rest = pool.shape
        return pl.BlockSpec(
            (num_blocks, None, *rest), lambda *program: (0, program[head_axis], *(0,) * len(rest))
        )

    return [spec(pool) for pool in pools]


def scale_queries(fixed: Attention, q: jax.Array) -> jax.Array:
    """Queries scaled and rounded as the reference does."""
    return (q.astype(jnp.float32) * fixed.head_dim**-0.5).astype(fixed.dtype)


def load_queries(fixed: Attention, q_ref, rows: jax.Array) -> list[jax.Array]:
    """Scaled rows of q [X, D]: one [R, part] per part."""
    return [scale_queries(fixed, load_rows(q_ref, (rows,), *part, fixed.head_dim)) for part in fixed.parts]


def empty_state(fixed: Attention, rows: int) -> tuple:
    """(maximum [R], sum [R], a float32 accumulator [R, part] per result part) before the first tile."""
    return (
        jnp.full((rows,), NEVER, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, size), jnp.float32) for _, size, _ in fixed.result_parts),
    )


def softmax_step(
    fixed: Attention,
    pool_refs,
    ids: jax.Array,
    q: list[jax.Array],
    state: tuple,
    *,
    seen: jax.Array | None = None,
    written: jax.Array | None = None,
) -> tuple:
    """One tile of context: online softmax in base 2 (Milakov & Gimelshein 2018; Dao et al. 2022).

    Args:
      pool_refs: K and V [N, P, D], then their scales [N, P] where the pool is quantized; V is
        [N, P, D/2] where it is packed.
      ids: int32 [X], the blocks of the tile; its C = X * P tokens.
      q: [R, part] per part.
      state: as of `empty_state`; base-2 logarithms.
      seen: [R, C], which scores count; `None` is all.
      written: [C], slots that may be read; `None` is all. What the others hold, NaN included,
        changes nothing.
    """
    k_ref, v_ref, *scale_refs = pool_refs
    top, total, acc = state
    scores = functools.reduce(
        operator.add,
        (
            _product(fixed, rows, _operands(fixed, _load(fixed, k_ref, ids, *part, fixed.head_dim)).T)
            for part, rows in zip(fixed.parts, q, strict=True)
        ),
    )
    if fixed.quantized:
        scores *= _load_scale(scale_refs[0], ids)[None, :]
    if fixed.soft_cap is None:
        scores *= LOG2_E
    else:
        scores = (fixed.soft_cap * LOG2_E) * _tanh(scores * (1 / fixed.soft_cap))
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_top[:, None])
    keep = jnp.exp2(top - new_top)
    total = total * keep + jnp.sum(weights, axis=1)
    if fixed.quantized:
        scale = _load_scale(scale_refs[1], ids)
        weights *= (scale if written is None else jnp.where(written, scale, 0))[None, :]
    weights = weights.astype(fixed.dtype)
    updated = []
    for values, old in zip(_load_values(fixed, v_ref, ids), acc, strict=True):
        if written is not None:
            values = jnp.where(written[:, None], values, jnp.zeros((), values.dtype))
        updated.append(old * keep[:, None] + _product(fixed, weights, values))
    return new_top, total, tuple(updated)


def _tanh(x: jax.Array) -> jax.Array:
    """tanh by exp2, exact to float32 rounding; finite for every finite x, and odd."""
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    return jnp.sign(x) * (1 - e) / (1 + e)


def _product(fixed: Attention, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=fixed.precision, preferred_element_type=jnp.float32)


def _load(fixed: Attention, ref, ids: jax.Array, offset: int, size: int, end: int) -> jax.Array:
    """[C, size] of the blocks `ids` from [N, P, X]: see `load_rows`."""
    token = jnp.arange(fixed.block_size, dtype=jnp.int32)
    x = load_rows(ref, (ids[:, None], token[None, :]), offset, size, end)
    return x.reshape(ids.shape[0] * fixed.block_size, size)


def _load_values(fixed: Attention, ref, ids: jax.Array) -> Iterator[jax.Array]:
    """V's operands [C, part], per result part."""
    if not fixed.packed_values:
        for part in fixed.value_parts:
            yield _operands(fixed, _load(fixed, ref, ids, *part, fixed.head_dim))
        return
    for part in fixed.value_parts:
        x = lax.bitcast_convert_type(_load(fixed, ref, ids, *part, fixed.head_dim // 2), jnp.int8)
        for low in (lax.shift_left(x, jnp.int8(4)), x):
            yield lax.shift_right_arithmetic(low, jnp.int8(4)).astype(fixed.dtype)


def _operands(fixed: Attention, x: jax.Array) -> jax.Array:
    """Entries of a pool as operands of products."""
    if x.dtype == jnp.uint8:  # float8_e4m3fn, for GPUs that have no such type
        return _decode_fp8(x).astype(fixed.dtype)
    if x.dtype == jnp.float8_e4m3fn and fixed.dtype == "float16":
        return x.astype(jnp.float32).astype(fixed.dtype)
    return x.astype(fixed.dtype)


def load_rows(ref, index: tuple[jax.Array, ...], offset: int, size: int, end: int) -> jax.Array:
    """Columns from `offset` [..., size] of an array [..., X] at broadcast indices of its other axes.

    Columns from `end` on are not read; they are zeros.
    """
    column = offset + jnp.arange(size, dtype=jnp.int32)
    at = ref.at[(*(x[..., None] for x in index), column.reshape((1,) * index[0].ndim + (size,)))]
    if offset + size <= end:
        return triton.load(at)
    shape = (*jnp.broadcast_shapes(*(x.shape for x in index)), size)
    mask = jnp.broadcast_to(column < end, shape)
    return triton.load(at, mask=mask, other=jnp.zeros((), ref.dtype))


def _load_scale(ref, ids: jax.Array) -> jax.Array:
    """float32 [C] of the blocks `ids` from [N, P]."""
    return ref[ids].reshape(-1).astype(jnp.float32)


def _decode_fp8(bits: jax.Array) -> jax.Array:
    """float8_e4m3fn from its bits, by way of the float16 with the same mantissa: exact, NaN aside."""
    bits = bits.astype(jnp.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256


def store_result(fixed: Attention, ref, rows: jax.Array, state: tuple, mask: jax.Array) -> None:
    """Stores a state's outcome in the distinct rows [R] whose mask is set; zeros where nothing was seen."""
    _, total, acc = state
    scale = 1 / jnp.where(total > 0, total, 1)
    store_rows(fixed, ref, rows, [part * scale[:, None] for part in acc], mask)


def store_rows(fixed: Attention, ref, rows: jax.Array, values: Sequence[jax.Array], mask: jax.Array) -> None:
    """Stores values, [R, part] per result part, in the distinct rows [R] of [X, D] whose mask is set."""
    for (offset, size, end), part in zip(fixed.result_parts, values, strict=True):
        column = offset + jnp.arange(size, dtype=jnp.int32)
        stored = mask[:, None]
        if offset + size > end:
            stored &= (column < end)[None, :]
        triton.store(
            ref.at[rows[:, None], column[None, :]],
            part.astype(ref.dtype),
            mask=jnp.broadcast_to(stored, part.shape),
        )


def context_ranges(fixed: Attention, tuning: Any, length: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """First block, blocks per range, end block of contexts of `length` tokens.

    Args:
      tuning: its `tile_blocks`, `split_blocks` and `max_splits` count.
    """
    first: Any = 0
    if fixed.window is not None:
        first = lax.div(jnp.maximum(length - fixed.window, 0), fixed.block_size)
    end = lax.div(length + (fixed.block_size - 1), fixed.block_size)
    step = tuning.tile_blocks * tuning.max_splits
    each = lax.div(end - first + (step - 1), step) * tuning.tile_blocks
    return first, jnp.maximum(each, tuning.split_blocks), end


def cap_splits(tuning: Any, width: int) -> Any:
    """The tuning of a decode kernel, with no more ranges than a block table of `width` columns has."""
    most = -(-width // tuning.split_blocks)
    return dataclasses.replace(tuning, max_splits=max(1, min(tuning.max_splits, most)))


def merge_ranges(
    fixed: Attention, tuning: Any, context_lens: jax.Array, out: jax.Array, lse: jax.Array
) -> jax.Array:
    """Attention of whole contexts from that of their ranges.

    Args:
      out: float32 [S, H, X, D], of each range of `context_ranges`; what others hold, NaN included,
        changes nothing.
      lse: float32 [S, H, X], base-2 logarithms of the sums of exponentials.

    Returns:
      [S, H, D]; zeros where there is no range.
    """
    first, each, end = context_ranges(fixed, tuning, context_lens)
    counts = lax.div(end - first + each - 1, each)
    used = jnp.arange(lse.shape[2])[None] < counts[:, None]  # [S, X]
    lse = jnp.where(used[:, None], lse, NEVER)
    weights = jnp.exp2(lse - jnp.max(lse, axis=2, keepdims=True))
    weights /= jnp.sum(weights, axis=2, keepdims=True)
    return jnp.sum(jnp.where(used[:, None, :, None], out, 0) * weights[..., None], axis=2)
