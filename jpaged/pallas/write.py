"""Stores new keys and values into their slots, in place."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.pallas.common import check_pool_size, whole

_TILE_VALUES = 2048  # of K, and as many of V, per program
_NUM_WARPS = 4


def _kernel(k_ref, v_ref, slot_ref, _k_pool, _v_pool, k_out, v_out, *, rows, block_size, kv_heads, parts):
    total = k_ref.shape[0]
    # Rows past the last repeat it: they store the same values in the same place.
    row = jnp.minimum(pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32), total - 1)
    slot = slot_ref[row // kv_heads]
    place = ((slot // block_size) * kv_heads + row % kv_heads) * block_size + slot % block_size
    for part in parts:
        k_out[place, pl.ds(*part)] = k_ref[row, pl.ds(*part)].astype(k_out.dtype)
        v_out[place, pl.ds(*part)] = v_ref[row, pl.ds(*part)].astype(v_out.dtype)


def _powers(size: int) -> tuple[tuple[int, int], ...]:
    """Cuts `size` into powers of two: (offset, size) of each, largest first."""
    parts, offset = [], 0
    while offset < size:
        part = 1 << ((size - offset).bit_length() - 1)
        parts.append((offset, part))
        offset += part
    return tuple(parts)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Stores the K and V of T tokens, rounded to the pools' dtype.

    Args:
      k_pool, v_pool: [N, K, P, D]; where they are donated nothing else is touched or copied.
      k, v: [T, K, D].
      slots: int32 [T], `block * P + offset`; padding tokens point into block 0, where the last
        write wins.

    Raises:
      ValueError: a pool whose offsets do not fit 32 bits.
    """
    num_tokens, kv_heads, head_dim = k.shape
    block_size = k_pool.shape[2]
    check_pool_size(k_pool)
    if k_pool.dtype == jnp.float8_e4m3fn:  # bits are stored: GPUs before Ada have no such type
        k, v = (_bits(x.astype(k_pool.dtype)) for x in (k, v))
        out = write_kv(_bits(k_pool), _bits(v_pool), k, v, slots, interpret=interpret)
        return tuple(lax.bitcast_convert_type(x, k_pool.dtype) for x in out)
    parts = _powers(head_dim)
    rows = _TILE_VALUES // (1 << (head_dim - 1).bit_length())
    flat = [x.reshape(-1, head_dim) for x in (k, v)]
    pools = [x.reshape(-1, head_dim) for x in (k_pool, v_pool)]
    out = pl.pallas_call(
        functools.partial(_kernel, rows=rows, block_size=block_size, kv_heads=kv_heads, parts=parts),
        grid=(pl.cdiv(num_tokens * kv_heads, rows),),
        in_specs=[*(whole(x.shape) for x in flat), whole(slots.shape), *(whole(x.shape) for x in pools)],
        out_specs=[whole(x.shape) for x in pools],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(*flat, slots, *pools)
    return out[0].reshape(k_pool.shape), out[1].reshape(v_pool.shape)
