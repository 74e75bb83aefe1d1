"""The device half of the KV cache: one K and one V pool per layer.

Owns how keys and values are stored (formats, arrays, sizes in bytes). Which block belongs to whom is
decided on the host (`scheduling.kv_manager`).

A quantized entry is fixed when it is written: each token and head has a scale of its own, so what is
stored never depends on what is written later.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jpaged.config import LARGEST, ModelConfig

SCALE_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How a model's keys and values are stored.

    Attributes:
      dtype: of the operands of products that read quantized entries: that of the weights.
      k, v: the format of each layer: a dtype name, or one of `LARGEST`.
    """

    dtype: str
    k: tuple[str, ...]
    v: tuple[str, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: str, kv_cache_dtype: str = "auto", skip_layers: tuple[int, ...] = ()
    ) -> KVLayout:
        """The layout that `EngineConfig`'s fields of these names ask for.

        `auto` is `dtype`. `int4` is that of the values; keys, which bear it badly, are int8 then.

        Raises:
          ValueError: a layer to skip is not there.
        """
        kv_cache_dtype = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        for layer in skip_layers:
            if layer not in range(config.num_layers):
                raise ValueError(
                    f"kv_cache_skip_layers has {layer!r}; the model has {config.num_layers} layers"
                )
        formats = tuple(dtype if i in skip_layers else kv_cache_dtype for i in range(config.num_layers))
        return cls(dtype, k=tuple("int8" if f == "int4" else f for f in formats), v=formats)


@struct.dataclass
class Pool:
    """The keys, or the values, of one layer; block 0 is the null block, written by padding, read by nobody.

    Attributes:
      data: [N, K, P, D]; int4 packs dimensions i and i + D/2 into one byte of [N, K, P, D/2]. On a
        CPU floats of 8 and 16 bits are stored as integers, because XLA's CPU backend converts a
        whole pool to float32 and back around a scatter.
      scale: bfloat16 [N, K, P] of a quantized format, stored as `data` is; else `None`.
      format: a dtype name, or one of `LARGEST`.
      dtype: of the values as operands of products.
      is_rotated: whether what is stored was turned by `rotate`.
    """

    data: jax.Array
    scale: jax.Array | None
    format: str = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)
    is_rotated: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_heads(self) -> int:
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        return self.data.shape[2]


@struct.dataclass
class KVCache:
    """The pools of every layer."""

    k: tuple[Pool, ...]
    v: tuple[Pool, ...]


def _entry_dtype(format: str) -> jnp.dtype:
    """Dtype of the entries of an array that holds values of a format."""
    return jnp.dtype({"int4": "uint8", "fp8_e4m3": "float8_e4m3fn"}.get(format, format))


def _num_entries(format: str, head_dim: int) -> int:
    """Entries that hold one token's values of one head."""
    return head_dim // 2 if format == "int4" else head_dim


def storage_dtype(dtype: Any, platform: str) -> jnp.dtype:
    """The dtype in which values of `dtype` are stored on `platform`."""
    value = jnp.dtype(dtype)
    is_small_float = jnp.issubdtype(value, jnp.floating) and value.itemsize < 4
    return jnp.dtype(f"uint{8 * value.itemsize}") if platform == "cpu" and is_small_float else value


def init_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, layout: KVLayout, platform: str
) -> KVCache:
    """Zeroed pools of `num_blocks` blocks, the null block included."""

    def pool(format: str, is_rotated: bool) -> Pool:
        shape = (num_blocks, config.num_kv_heads, block_size)
        stored = storage_dtype(_entry_dtype(format), platform)
        data = jnp.zeros((*shape, _num_entries(format, config.head_dim)), stored)
        quantized = format in LARGEST
        scale = jnp.zeros(shape, storage_dtype(SCALE_DTYPE, platform)) if quantized else None
        return Pool(data, scale, format, layout.dtype if quantized else format, is_rotated)

    return KVCache(
        k=tuple(pool(format, format in LARGEST) for format in layout.k),
        v=tuple(pool(format, format == "int4") for format in layout.v),
    )


def bytes_per_token(config: ModelConfig, layout: KVLayout) -> int:
    """Bytes of one token's K and V in every layer, scales included."""

    def head_bytes(format: str) -> int:
        entries = _num_entries(format, config.head_dim) * _entry_dtype(format).itemsize
        return entries + (jnp.dtype(SCALE_DTYPE).itemsize if format in LARGEST else 0)

    return config.num_kv_heads * sum(map(head_bytes, (*layout.k, *layout.v)))


def bytes_per_block(config: ModelConfig, block_size: int, layout: KVLayout) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer, scales included."""
    return block_size * bytes_per_token(config, layout)


# -- values and entries -----------------------------------------------------------------------


def quantize(x: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """Values as a quantized format holds them, with one scale for each last axis.

    The largest magnitude is mapped to `LARGEST[format]`; values are divided by the scale as it is
    stored, so its rounding costs nothing. NaN and infinities make the scale NaN or infinite, and
    with it all that is read back.

    Args:
      x: [..., D].

    Returns:
      entries [..., D], or [..., D/2] where two are packed; scales bfloat16 [...].
    """
    x = x.astype(jnp.float32)
    largest = LARGEST[format]
    scale = (jnp.max(jnp.abs(x), axis=-1) / largest).astype(SCALE_DTYPE)
    divisor = scale.astype(jnp.float32)[..., None]
    # A scale of zero holds nothing but values too small to be told from zero.
    scaled = jnp.where(divisor == 0, 0, x / jnp.where(divisor == 0, 1, divisor))
    scaled = jnp.clip(scaled, -largest, largest)
    if format == "fp8_e4m3":
        return scaled.astype(jnp.float8_e4m3fn), scale
    whole = jnp.round(scaled).astype(jnp.int8)
    return (pack_int4(whole) if format == "int4" else whole), scale


def pack_int4(x: jax.Array) -> jax.Array:
    """Whole numbers from -8 to 7, int8 [..., D], two to a byte: uint8 [..., D/2].

    Byte i holds dimension i in its low half and dimension i + D/2 in its high half.
    """
    low, high = jnp.split(lax.bitcast_convert_type(x, jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def unpack_int4(x: jax.Array) -> jax.Array:
    """The int8 [..., D] that `pack_int4` made uint8 [..., D/2] of."""
    x = lax.bitcast_convert_type(x, jnp.int8)
    low = lax.shift_right_arithmetic(lax.shift_left(x, jnp.int8(4)), jnp.int8(4))
    return jnp.concatenate([low, lax.shift_right_arithmetic(x, jnp.int8(4))], axis=-1)


def _to_storage(x: jax.Array, stored: jnp.dtype) -> jax.Array:
    return x if x.dtype == stored else lax.bitcast_convert_type(x, stored)


def _from_storage(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == jnp.dtype(dtype) else lax.bitcast_convert_type(x, dtype)


def decode_values(entries: jax.Array, format: str, dtype: str) -> jax.Array:
    """Stored entries [..., D] (or packed [..., D/2]) as values of `dtype`, not yet scaled."""
    if format == "int4":
        return unpack_int4(entries).astype(dtype)
    return _from_storage(entries, _entry_dtype(format)).astype(dtype)


def decode_scale(scale: jax.Array) -> jax.Array:
    """Stored scales as float32."""
    return _from_storage(scale, SCALE_DTYPE).astype(jnp.float32)


def device_arrays(pool: Pool) -> tuple[jax.Array, jax.Array | None]:
    """Entries and scales in the dtypes that a GPU stores them in: what the kernels take."""
    scale = None if pool.scale is None else _from_storage(pool.scale, SCALE_DTYPE)
    return _from_storage(pool.data, _entry_dtype(pool.format)), scale


def with_device_arrays(pool: Pool, data: jax.Array, scale: jax.Array | None) -> Pool:
    """The pool with other entries and scales, given as `device_arrays` has them."""
    if pool.scale is not None and scale is not None:
        scale = _to_storage(scale, pool.scale.dtype)
    return dataclasses.replace(pool, data=_to_storage(data, pool.data.dtype), scale=scale)


def rotate(x: jax.Array, pool: Pool) -> jax.Array:
    """[..., D] turned by a Hadamard matrix if the pool holds such; twice gives it back.

    It spreads a channel that is larger than all others over the whole head (Ashkboos et al., QuaRot,
    2024). Rotated queries have the same products with rotated keys, and a sum of rotated values is
    turned back.
    """
    if not pool.is_rotated:
        return x
    return jnp.dot(x.astype(jnp.float32), hadamard(x.shape[-1]), precision=lax.Precision.HIGHEST)


def hadamard(head_dim: int) -> np.ndarray:
    """Sylvester's matrix of the largest power of two that divides D, as often as it fits: [D, D]."""
    size = head_dim & -head_dim
    index = np.arange(size)
    odd = np.bitwise_count(index[:, None] & index[None, :]) % 2
    return np.kron(np.eye(head_dim // size), (1 - 2.0 * odd) / np.sqrt(size)).astype(np.float32)


# -- whole pools ------------------------------------------------------------------------------


def write_kv(k_pool: Pool, v_pool: Pool, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Pool, Pool]:
    """Stores new tokens' K and V, in place where the pools are donated.

    Args:
      k, v: [T, K, D], turned by `rotate` where the pool holds such.
      slots: int32 [T], `block * P + offset`; padding tokens point into block 0.
    """
    block, offset = slots // k_pool.block_size, slots % k_pool.block_size

    def put(array: jax.Array, x: jax.Array) -> jax.Array:
        stored = _to_storage(x, array.dtype)
        return array.at[block, :, offset].set(stored, mode="promise_in_bounds")

    def write(pool: Pool, x: jax.Array) -> Pool:
        if pool.scale is None:
            return dataclasses.replace(pool, data=put(pool.data, x.astype(pool.format)))
        entries, scale = quantize(x, pool.format)
        return dataclasses.replace(pool, data=put(pool.data, entries), scale=put(pool.scale, scale))

    return write(k_pool, k), write(v_pool, v)


def copy_blocks(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies whole blocks, in every layer: int32 [C] block ids; padding copies block 0 to itself."""

    def copy(array: jax.Array) -> jax.Array:
        return array.at[target].set(array[source], mode="promise_in_bounds")

    return jax.tree.map(copy, cache)
