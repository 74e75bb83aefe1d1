"""Where new keys and values land in the pools, and that the pools stay where they are."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import tiny_config

from jpaged.kv_cache import (
    KVCache,
    bytes_per_block,
    copy_blocks,
    from_storage,
    init_kv_cache,
    storage_dtype,
    to_storage,
    write_kv,
)
from jpaged.pallas import write as pallas_write

N, K, P, D = 9, 2, 4, 6
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

xla = functools.partial(jax.jit, static_argnames="dtype", donate_argnums=(0, 1))(write_kv)


@functools.partial(jax.jit, static_argnames="dtype", donate_argnums=(0, 1))
def pallas(k_pool, v_pool, k, v, slots, dtype):
    pools = (from_storage(pool, dtype) for pool in (k_pool, v_pool))
    written = pallas_write.write_kv(*pools, k, v, slots, interpret=True)
    return tuple(to_storage(pool, dtype, k_pool.dtype) for pool in written)


WRITE = {"xla": xla, "pallas": pallas}
on_every_implementation = pytest.mark.parametrize("write", WRITE.values(), ids=list(WRITE))


def numbered_pools(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Pools in which every entry is known, as they are stored on a CPU."""
    stored = storage_dtype(dtype, "cpu")
    k = (np.arange(N * K * P * D) % 97).reshape(N, K, P, D).astype(DTYPES[dtype])
    return k.view(stored), (-k).view(stored)


@on_every_implementation
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_token_lands_in_its_slot_and_nothing_else_changes(dtype, write):
    rng = np.random.default_rng(0)
    k_pool, v_pool = numbered_pools(dtype)
    slots = np.array([4 * 5 + 3, 4 * 1, 4 * 8 + 2, 4 * 5 + 2, 4 * 8 + 3], np.int32)
    k, v = rng.standard_normal((2, len(slots), K, D)).astype(np.float32)
    got_k, got_v = write(jnp.asarray(k_pool), jnp.asarray(v_pool), k, v, slots, dtype=dtype)
    assert got_k.dtype == k_pool.dtype and got_v.dtype == v_pool.dtype
    for got, pool, new in ((got_k, k_pool, k), (got_v, v_pool, v)):
        expected = pool.copy()
        for token, slot in enumerate(slots):
            expected[slot // P, :, slot % P] = new[token].astype(DTYPES[dtype]).view(pool.dtype)
        np.testing.assert_array_equal(np.asarray(got), expected)


@on_every_implementation
def test_padding_writes_to_the_null_block_alone(write):
    k_pool, v_pool = numbered_pools("float32")
    slots = np.array([0, 4 * 2 + 1, 0, 0], np.int32)
    k = np.full((4, K, D), np.nan, np.float32)
    k[1] = 1000
    got_k, got_v = write(jnp.asarray(k_pool), jnp.asarray(v_pool), k, k, slots, dtype="float32")
    for got, pool in ((got_k, k_pool), (got_v, v_pool)):
        expected = pool.copy()
        expected[2, :, 1] = 1000
        np.testing.assert_array_equal(np.asarray(got)[1:], expected[1:])
        np.testing.assert_array_equal(np.asarray(got)[0, :, 1:], pool[0, :, 1:])


def pool_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of a compiled program that copy or convert an array of `shape`."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"= \S*\[{dims}\]\S* (?:copy|convert|copy-start|transpose)\(.*", hlo)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_donated_pools_are_written_in_place(dtype):
    shape = (512, K, P, D)
    pool = jax.ShapeDtypeStruct(shape, storage_dtype(dtype, "cpu"))
    new = jax.ShapeDtypeStruct((3, K, D), jnp.float32)
    slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    compiled = xla.lower(pool, pool, new, new, slots, dtype=dtype).compile()
    size = int(np.prod(shape)) * pool.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * size
    assert memory.temp_size_in_bytes < size / 8
    assert not pool_copies(compiled.as_text(), shape)


def test_pools_that_are_not_donated_are_copied():
    """So `pool_copies` finds a copy where there is one."""
    shape = (512, K, P, D)
    pool = jax.ShapeDtypeStruct(shape, jnp.float32)
    new = jax.ShapeDtypeStruct((3, K, D), jnp.float32)
    slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    plain = jax.jit(write_kv, static_argnames="dtype")
    compiled = plain.lower(pool, pool, new, new, slots, dtype="float32").compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert pool_copies(compiled.as_text(), shape)


def test_values_of_16_bits_are_stored_as_such_on_a_gpu_and_as_integers_on_a_cpu():
    for dtype in ("bfloat16", "float16"):
        assert storage_dtype(dtype, "cpu") == jnp.uint16
        assert storage_dtype(dtype, "gpu") == jnp.dtype(dtype)
    assert storage_dtype("float32", "cpu") == storage_dtype("float32", "gpu") == jnp.float32


def numbered_cache() -> KVCache:
    """Two layers; an entry says its layer, whether it is K or V, and its block."""
    block = np.broadcast_to(np.arange(N, dtype=np.float32)[:, None, None, None], (N, K, P, D))
    return KVCache(
        k=tuple(jnp.asarray(100 * layer + block) for layer in (1, 2)),
        v=tuple(jnp.asarray(-100 * layer - block) for layer in (1, 2)),
        dtype="float32",
    )


def blocks_of(cache: KVCache) -> list[list[float]]:
    """What each block of each pool holds; a block must hold one value throughout."""
    pools = [np.asarray(pool).reshape(N, -1) for pool in (*cache.k, *cache.v)]
    assert all((pool == pool[:, :1]).all() for pool in pools)
    return [pool[:, 0].tolist() for pool in pools]


def test_copies_read_every_source_before_they_write():
    copy = jax.jit(copy_blocks, donate_argnums=0)
    source = np.array([1, 2, 3, 0, 7], np.int32)  # a chain, a pair that padding fills, and one more
    target = np.array([2, 3, 4, 0, 5], np.int32)
    got = blocks_of(copy(numbered_cache(), source, target))
    held = [0, 1, 1, 2, 3, 7, 6, 7, 8]
    for sign, layer, blocks in zip((1, 1, -1, -1), (1, 2, 1, 2), got, strict=True):
        assert blocks == [sign * (100 * layer + block) for block in held]


def test_a_cache_holds_what_bytes_per_block_says():
    config = tiny_config(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6)
    for dtype in DTYPES:
        cache = init_kv_cache(config, num_blocks=5, block_size=4, dtype=dtype, platform="cpu")
        leaves = jax.tree.leaves(cache)
        assert [leaf.shape for leaf in leaves] == [(5, 2, 4, 6)] * 6
        assert sum(leaf.nbytes for leaf in leaves) == 5 * bytes_per_block(config, 4, dtype)
        assert not any(np.asarray(leaf).any() for leaf in leaves)
