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
    KVLayout,
    Pool,
    bytes_per_block,
    copy_blocks,
    decode_scale,
    decode_values,
    device_arrays,
    hadamard,
    init_kv_cache,
    pack_int4,
    quantize,
    storage_dtype,
    unpack_int4,
)
from jpaged.ops import attention
from jpaged.ops.attention import Backend

N, K, P, D = 9, 2, 4, 6
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_kv(backend, k_pool, v_pool, k, v, slots):
    """Writes K and V [T, K, D] that lie behind three queries, which are not to be read."""
    queries = jnp.full((*k.shape[:2], 3, k.shape[2]), jnp.nan)
    qkv = jnp.concatenate([queries, k[:, :, None], v[:, :, None]], axis=2)
    return attention.write_kv(backend, k_pool, v_pool, qkv, slots)


xla = jax.jit(functools.partial(write_kv, Backend("xla")), donate_argnums=(0, 1))
pallas = jax.jit(functools.partial(write_kv, Backend("pallas_interpret")), donate_argnums=(0, 1))

WRITE = {"xla": xla, "pallas": pallas}
on_every_implementation = pytest.mark.parametrize("write", WRITE.values(), ids=list(WRITE))


def numbered_pools(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Entries that are all known, as they are stored on a CPU, of K and of V."""
    stored = storage_dtype(dtype, "cpu")
    k = (np.arange(N * K * P * D) % 97).reshape(N, K, P, D).astype(DTYPES[dtype])
    return k.view(stored), (-k).view(stored)


def written(write, entries, k, v, slots, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Entries of K and V after a write into pools that held `entries`."""
    pools = (Pool(jnp.asarray(data), None, dtype, dtype) for data in entries)
    got = write(*pools, k, v, slots)
    for pool, old in zip(got, entries, strict=True):
        assert pool.data.dtype == old.dtype and pool.scale is None
    return tuple(np.asarray(pool.data) for pool in got)


@on_every_implementation
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_token_lands_in_its_slot_and_nothing_else_changes(dtype, write):
    rng = np.random.default_rng(0)
    k_pool, v_pool = numbered_pools(dtype)
    slots = np.array([4 * 5 + 3, 4 * 1, 4 * 8 + 2, 4 * 5 + 2, 4 * 8 + 3], np.int32)
    k, v = rng.standard_normal((2, len(slots), K, D)).astype(np.float32)
    got_k, got_v = written(write, (k_pool, v_pool), k, v, slots, dtype)
    for got, pool, new in ((got_k, k_pool, k), (got_v, v_pool, v)):
        expected = pool.copy()
        for token, slot in enumerate(slots):
            expected[slot // P, :, slot % P] = new[token].astype(DTYPES[dtype]).view(pool.dtype)
        np.testing.assert_array_equal(got, expected)


@on_every_implementation
def test_padding_writes_to_the_null_block_alone(write):
    k_pool, v_pool = numbered_pools("float32")
    slots = np.array([0, 4 * 2 + 1, 0, 0], np.int32)
    k = np.full((4, K, D), np.nan, np.float32)
    k[1] = 1000
    got_k, got_v = written(write, (k_pool, v_pool), k, k, slots, "float32")
    for got, pool in ((got_k, k_pool), (got_v, v_pool)):
        expected = pool.copy()
        expected[2, :, 1] = 1000
        np.testing.assert_array_equal(got[1:], expected[1:])
        np.testing.assert_array_equal(got[0, :, 1:], pool[0, :, 1:])


def pool_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of a compiled program that copy or convert an array of `shape`."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"= \S*\[{dims}\]\S* (?:copy|convert|copy-start|transpose)\(.*", hlo)


FORMATS = [*DTYPES, "int8", "fp8_e4m3", "int4"]


def abstract_write(format: str) -> tuple[list, int]:
    """Arguments of a write into large pools of a format, and the bytes of one pool's entries."""
    config = tiny_config(num_layers=1, num_heads=K, num_kv_heads=K, head_dim=D)
    layout = KVLayout.of(config, "float32", format)
    cache = jax.eval_shape(lambda: init_kv_cache(config, 512, P, layout, "cpu"))
    new = jax.ShapeDtypeStruct((3, K, D), jnp.float32)
    data = cache.k[0].data
    return [cache.k[0], cache.v[0], new, new, jax.ShapeDtypeStruct((3,), jnp.int32)], (
        data.size * data.dtype.itemsize
    )


@pytest.mark.parametrize("format", FORMATS)
def test_donated_pools_are_written_in_place(format):
    arguments, size = abstract_write(format)
    compiled = xla.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[:2]))
    assert memory.alias_size_in_bytes == total >= 2 * size
    assert memory.temp_size_in_bytes < size / 8
    for leaf in jax.tree.leaves(arguments[:2]):
        assert not pool_copies(compiled.as_text(), leaf.shape)


def test_pools_that_are_not_donated_are_copied():
    """So `pool_copies` finds a copy where there is one."""
    arguments, _ = abstract_write("float32")
    compiled = jax.jit(functools.partial(write_kv, Backend("xla"))).lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert pool_copies(compiled.as_text(), arguments[0].data.shape)


def test_values_of_16_bits_are_stored_as_such_on_a_gpu_and_as_integers_on_a_cpu():
    for dtype in ("bfloat16", "float16"):
        assert storage_dtype(dtype, "cpu") == jnp.uint16
        assert storage_dtype(dtype, "gpu") == jnp.dtype(dtype)
    assert storage_dtype("float32", "cpu") == storage_dtype("float32", "gpu") == jnp.float32


def numbered_cache() -> KVCache:
    """Two layers; an entry says its layer, whether it is K or V, and its block."""
    block = np.broadcast_to(np.arange(N, dtype=np.float32)[:, None, None, None], (N, K, P, D))

    def pool(values: np.ndarray) -> Pool:
        return Pool(jnp.asarray(values), jnp.asarray(values[..., 0]), "int8", "float32")

    return KVCache(
        k=tuple(pool(100 * layer + block) for layer in (1, 2)),
        v=tuple(pool(-100 * layer - block) for layer in (1, 2)),
    )


def blocks_of(cache: KVCache) -> list[list[float]]:
    """What each block of each pool holds; a block must hold one value throughout."""
    pools = [np.asarray(array).reshape(N, -1) for array in jax.tree.leaves(cache)]
    assert all((pool == pool[:, :1]).all() for pool in pools)
    return [pool[:, 0].tolist() for pool in pools]


def test_copies_read_every_source_before_they_write():
    copy = jax.jit(copy_blocks, donate_argnums=0)
    source = np.array([1, 2, 3, 0, 7], np.int32)  # a chain, a pair that padding fills, and one more
    target = np.array([2, 3, 4, 0, 5], np.int32)
    got = blocks_of(copy(numbered_cache(), source, target))
    held = [0, 1, 1, 2, 3, 7, 6, 7, 8]
    for sign, layer, blocks in zip((1,) * 4 + (-1,) * 4, (1, 1, 2, 2) * 2, got, strict=True):
        assert blocks == [sign * (100 * layer + block) for block in held]


@pytest.mark.parametrize("head_dim", [6, 64, 80, 96, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_a_cache_holds_what_bytes_per_block_says(format, head_dim):
    config = tiny_config(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=head_dim)
    layout = KVLayout.of(config, "float32", format, skip_layers=(1,))
    for platform in ("cpu", "gpu"):
        leaves = jax.tree.leaves(init_kv_cache(config, 5, 4, layout, platform))
        assert all(leaf.shape[:3] == (5, 3, 4) for leaf in leaves)
        assert sum(leaf.nbytes for leaf in leaves) == 5 * bytes_per_block(config, 4, layout)
        assert not any(np.asarray(leaf).any() for leaf in leaves)


@pytest.mark.parametrize(("format", "least"), [("int8", 1.9), ("fp8_e4m3", 1.9), ("int4", 2.5)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_quantized_caches_hold_more_tokens_scales_included(format, least, head_dim):
    config = tiny_config(num_layers=2, num_heads=6, num_kv_heads=3, head_dim=head_dim)
    half, small = (bytes_per_block(config, 16, KVLayout.of(config, "bfloat16", f)) for f in ("auto", format))
    assert half >= least * small


def test_layers_that_are_not_there_cannot_be_skipped():
    with pytest.raises(ValueError, match="kv_cache_skip_layers has 7; the model has 3 layers"):
        KVLayout.of(tiny_config(num_layers=3), "float32", "int8", (7,))


# -- quantized formats ------------------------------------------------------------------------

STEP = {"int8": 1 / 127, "fp8_e4m3": 1 / 14, "int4": 1 / 7}  # largest step between values, of the largest


def read_back(x: np.ndarray, format: str) -> np.ndarray:
    entries, scale = quantize(jnp.asarray(x), format)
    values = decode_values(entries, format, "float32") * decode_scale(scale)[..., None]
    return np.asarray(values)


@pytest.mark.parametrize("format", list(STEP))
class TestQuantize:
    @pytest.mark.parametrize("size", [0.001, 0.01, 1, 50, 10_000])
    def test_values_of_any_size_are_kept_to_half_a_step(self, format, size):
        x = size * np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
        largest = np.abs(x).max(axis=-1, keepdims=True)
        error = np.abs(read_back(x, format) - x) / largest
        assert error.max() <= 0.51 * STEP[format]
        assert np.sqrt(np.mean(error**2)) < 0.3 * STEP[format]

    def test_zeros_stay_zeros_and_do_not_disturb_others(self, format):
        x = np.zeros((3, 64), np.float32)
        x[1, 5] = -2
        got = read_back(x, format)
        assert np.array_equal(got == 0, x == 0)
        np.testing.assert_allclose(got, x, rtol=0.005)  # the scale has 8 bits

    def test_an_outlier_is_kept_and_costs_its_own_row_alone(self, format):
        x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
        x[0, 7] = 1000
        got = read_back(x, format)
        assert abs(got[0, 7] - 1000) <= 5
        assert np.array_equal(got[1], read_back(x[1:], format)[0])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_seen_when_it_is_read(self, format, value):
        x = np.ones((1, 64), np.float32)
        x[0, 3] = value
        assert not np.isfinite(read_back(x, format)).any()


def test_int4_is_packed_by_halves_and_comes_back():
    x = np.random.default_rng(0).integers(-8, 8, (5, 6)).astype(np.int8)
    packed = np.asarray(pack_int4(jnp.asarray(x)))
    assert packed.shape == (5, 3) and packed.dtype == np.uint8
    assert np.array_equal(packed % 16, x[:, :3] % 16) and np.array_equal(packed // 16, x[:, 3:] % 16)
    assert np.array_equal(np.asarray(unpack_int4(jnp.asarray(packed))), x)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 96, 256])
def test_the_rotation_is_orthonormal_and_spreads_a_channel(head_dim):
    rotation = hadamard(head_dim)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(head_dim), atol=1e-6)
    size = head_dim & -head_dim
    np.testing.assert_allclose(np.abs(rotation).max(axis=0), size**-0.5, rtol=1e-6)


@on_every_implementation
@pytest.mark.parametrize("format", list(STEP))
@pytest.mark.parametrize("head_dim", [64, 80])
def test_quantized_entries_land_with_their_scales(format, head_dim, write):
    rng = np.random.default_rng(0)
    config = tiny_config(num_layers=1, num_heads=K, num_kv_heads=K, head_dim=head_dim)
    cache = init_kv_cache(config, N, P, KVLayout.of(config, "float32", format), "cpu")
    slots = np.array([4 * 5 + 3, 4 * 1, 4 * 8 + 2, 4 * 5 + 2, 0], np.int32)
    k, v = rng.standard_normal((2, len(slots), K, head_dim)).astype(np.float32)
    pools = write(cache.k[0], cache.v[0], k, v, slots)
    for pool, new in zip(pools, (k, v), strict=True):
        new = new @ hadamard(head_dim) if pool.is_rotated else new
        entries, scale = device_arrays(pool)
        expected = [np.asarray(array) for array in quantize(jnp.asarray(new), pool.format)]
        for got, wanted in zip((np.asarray(entries), np.asarray(scale)), expected, strict=True):
            filled = np.zeros_like(got)
            for token, slot in enumerate(slots):
                filled[slot // P, :, slot % P] = wanted[token]
            # A scale may be rounded the other way, since the rotation's sums have another order.
            np.testing.assert_allclose(
                got.astype(np.float32), filled.astype(np.float32), atol=1e-6, rtol=0.07
            )
