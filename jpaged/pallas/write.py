"""Stores new keys and values into their slots, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.config import LARGEST
from jpaged.pallas.common import check_pool_size, load_rows, whole

_TILE_VALUES = 2048  # of K, and as many of V, per program
_NUM_WARPS = 4


def _kernel(qkv_ref, slot_ref, _k_pool, _v_pool, k_out, v_out, *, rows, block_size, kv_heads, parts):
    k_row, v_row, place = _rows_and_places(qkv_ref.shape[0], slot_ref, rows, block_size, kv_heads)
    for part in parts:
        k_out[place, pl.ds(*part)] = qkv_ref[k_row, pl.ds(*part)].astype(k_out.dtype)
        v_out[place, pl.ds(*part)] = qkv_ref[v_row, pl.ds(*part)].astype(v_out.dtype)


def _rows_and_places(
    total: int, slot_ref, rows: int, block_size: int, kv_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which of the `total` rows of qkv are the keys and values that a program stores, and where in a pool."""
    heads = slot_ref.shape[0] * kv_heads
    # Heads past the last repeat it: they store the same values in the same place.
    head = jnp.minimum(pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32), heads - 1)
    slot = slot_ref[head // kv_heads]
    end = (head + 1) * (total // heads)
    place = ((slot // block_size) * kv_heads + head % kv_heads) * block_size + slot % block_size
    return end - 2, end - 1, place


def _powers(size: int) -> tuple[tuple[int, int], ...]:
    """Cuts `size` into powers of two: (offset, size) of each, largest first."""
    parts, offset = [], 0
    while offset < size:
        part = 1 << ((size - offset).bit_length() - 1)
        parts.append((offset, part))
        offset += part
    return tuple(parts)


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    qkv: jax.Array,
    slots: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Stores the K and V of T tokens, rounded to the pools' dtype.

    Args:
      k_pool, v_pool: [N, K, P, D]; where they are donated nothing else is touched or copied.
      qkv: [T, K, X, D]: of each KV head the last two rows are its key and its value.
      slots: int32 [T], `block * P + offset`; padding tokens point into block 0, where the last
        write wins.

    Raises:
      ValueError: a pool whose offsets do not fit 32 bits.
    """
    num_tokens, kv_heads, _, head_dim = qkv.shape
    block_size = k_pool.shape[2]
    check_pool_size(k_pool)
    parts = _powers(head_dim)
    rows = _TILE_VALUES // (1 << (head_dim - 1).bit_length())
    flat = qkv.reshape(-1, head_dim)
    pools = [x.reshape(-1, head_dim) for x in (k_pool, v_pool)]
    out = pl.pallas_call(
        functools.partial(_kernel, rows=rows, block_size=block_size, kv_heads=kv_heads, parts=parts),
        grid=(pl.cdiv(num_tokens * kv_heads, rows),),
        in_specs=[whole(x.shape) for x in (flat, slots, *pools)],
        out_specs=[whole(x.shape) for x in pools],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={2: 0, 3: 1},
        compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(flat, slots, *pools)
    return out[0].reshape(k_pool.shape), out[1].reshape(v_pool.shape)


# -- quantized pools --------------------------------------------------------------------------


def _quantize_kernel(
    qkv_ref, slot_ref, *refs, rows: int, block_size: int, kv_heads: int, formats: tuple[str, str]
):
    pools = refs[len(refs) // 2 :]  # the first half are the same arrays, as inputs
    *places, place = _rows_and_places(qkv_ref.shape[0], slot_ref, rows, block_size, kv_heads)
    for row, format, data_ref, scale_ref in zip(places, formats, pools[:2], pools[2:], strict=True):
        width = data_ref.shape[1]
        size = 1 << (width - 1).bit_length()
        halves = range(0, qkv_ref.shape[1], width)  # two where a byte holds two values
        parts = [load_rows(qkv_ref, (row,), offset, size, offset + width) for offset in halves]
        top = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(part), axis=1) for part in parts))
        largest = LARGEST[format]
        scale = (top / largest).astype(scale_ref.dtype)
        divisor = scale.astype(jnp.float32)[:, None]
        scaled = [
            jnp.clip(
                jnp.where(divisor == 0, 0, part / jnp.where(divisor == 0, 1, divisor)), -largest, largest
            )
            for part in parts
        ]
        entries = _ENCODE[format](*scaled).astype(data_ref.dtype)
        column = jnp.arange(size, dtype=jnp.int32)[None, :]
        triton.store(
            data_ref.at[place[:, None], column], entries, mask=jnp.broadcast_to(column < width, entries.shape)
        )
        triton.store(scale_ref.at[place], scale)


def _round(x: jax.Array) -> jax.Array:
    """To the nearest whole number, halves to even, for magnitudes below 2**22: Triton cannot."""
    magic, bits = 1.5 * 2**23, 0x4B400000  # a kernel may hold numbers, not arrays
    return lax.bitcast_convert_type(x + magic, jnp.int32) - bits


def _encode_int4(low: jax.Array, high: jax.Array) -> jax.Array:
    return (_round(low) & 15) | ((_round(high) & 15) << 4)


def _encode_fp8(x: jax.Array) -> jax.Array:
    """The bits of float8_e4m3fn, rounded to nearest even; for GPUs that have no such type, too."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # 3 bits of the mantissa are kept
    subnormal = _round(jnp.abs(x) * 512)
    encoded = jnp.where(jnp.abs(x) < 2**-6, subnormal, normal - ((127 - 7) << 3))
    return encoded | ((bits >> 24) & 0x80)


_ENCODE: dict[str, Callable[..., jax.Array]] = {"int8": _round, "fp8_e4m3": _encode_fp8, "int4": _encode_int4}


def write_quantized_kv(
    pools: tuple[jax.Array, ...],
    qkv: jax.Array,
    slots: jax.Array,
    *,
    formats: tuple[str, str],
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Quantizes the K and V of T tokens and stores entries and scales, as `kv_cache.quantize` does.

    Args:
      pools: K's and V's entries, then K's and V's scales.
      formats: of K and of V: names in `jpaged.config.LARGEST`.
      Others as in `write_kv`.

    Returns:
      the pools.
    """
    num_tokens, kv_heads, _, head_dim = qkv.shape
    block_size = pools[0].shape[2]
    check_pool_size(pools[0])
    rows = _TILE_VALUES // (1 << (head_dim - 1).bit_length())
    arguments = [qkv.astype(jnp.float32).reshape(-1, head_dim), slots]
    data = [  # GPUs before Ada have no float8: its bits are stored
        lax.bitcast_convert_type(pool, jnp.uint8) if pool.dtype == jnp.float8_e4m3fn else pool
        for pool in pools[:2]
    ]
    flat = [pool.reshape(-1, pool.shape[3]) for pool in data] + [pool.reshape(-1) for pool in pools[2:]]
    out = pl.pallas_call(
        functools.partial(
            _quantize_kernel, rows=rows, block_size=block_size, kv_heads=kv_heads, formats=formats
        ),
        grid=(pl.cdiv(num_tokens * kv_heads, rows),),
        in_specs=[whole(x.shape) for x in (*arguments, *flat)],
        out_specs=[whole(x.shape) for x in flat],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
        input_output_aliases={len(arguments) + i: i for i in range(len(flat))},
        compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="write_quantized_kv",
    )(*arguments, *flat)
    return tuple(
        lax.bitcast_convert_type(x, pool.dtype).reshape(pool.shape)
        for x, pool in zip(out, pools, strict=True)
    )
