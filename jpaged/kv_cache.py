"""The device half of the KV cache: one K and one V pool per layer.

Owns the arrays' layout and their size in bytes. Which block belongs to whom is decided on the
host (`scheduling.kv_manager`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.config import ModelConfig


@struct.dataclass
class KVCache:
    """Pools [N, K, P, D] per layer; block 0 is the null block, written by padding, read by nobody.

    `dtype` is the dtype of the values. On a CPU a 16-bit float pool is stored as uint16, because
    XLA's CPU backend converts a whole 16-bit float pool to float32 and back around a scatter.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    dtype: str = struct.field(pytree_node=False)


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype in which a pool of `dtype` values is stored on `platform`."""
    value = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and value.itemsize == 2 else value


def init_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str, platform: str
) -> KVCache:
    """Zeroed pools of `num_blocks` blocks, the null block included."""
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    stored = storage_dtype(dtype, platform)

    def pools() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, stored) for _ in range(config.num_layers))

    return KVCache(k=pools(), v=pools(), dtype=dtype)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer."""
    values = 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim
    return values * jnp.dtype(dtype).itemsize


def to_storage(x: jax.Array, dtype: str, stored: jnp.dtype) -> jax.Array:
    """Values as they are stored: rounded to `dtype`, bits reinterpreted if the pool wants that."""
    x = x.astype(dtype)
    return x if x.dtype == stored else lax.bitcast_convert_type(x, stored)


def from_storage(x: jax.Array, dtype: str) -> jax.Array:
    """Stored entries as values of `dtype`."""
    return x if x.dtype == jnp.dtype(dtype) else lax.bitcast_convert_type(x, dtype)


def write_kv(
    cache_k: jax.Array, cache_v: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Stores new tokens' K and V, in place where the pools are donated.

    Args:
      cache_k, cache_v: pools of one layer, [N, K, P, D].
      k, v: [T, K, D].
      slots: int32 [T], `block * P + offset`; padding tokens point into block 0.
    """
    block_size = cache_k.shape[2]
    block, offset = slots // block_size, slots % block_size

    def put(pool: jax.Array, x: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(to_storage(x, dtype, pool.dtype), mode="promise_in_bounds")

    return put(cache_k, k), put(cache_v, v)


def copy_blocks(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies whole blocks, in every layer: int32 [C] block ids; padding copies block 0 to itself."""

    def copy(pool: jax.Array) -> jax.Array:
        return pool.at[target].set(pool[source], mode="promise_in_bounds")

    return dataclasses.replace(cache, k=tuple(map(copy, cache.k)), v=tuple(map(copy, cache.v)))
