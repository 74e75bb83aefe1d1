"""Sums that end in a norm, in Pallas' interpreter, against NumPy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.attention import XLA, Backend
from jpaged.ops.layers import add_product
from jpaged.ops.quantized import quantize_matrix
from jpaged.pallas.add_norm import add_norm

INTERPRETED = Backend("pallas_interpret")
EPS = 1e-5

interpreted = jax.jit(functools.partial(add_norm, eps=EPS, interpret=True))


def problem(num_parts: int, rows: int, width: int, *, bias: bool = False, dtype="float32", seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    parts = rng.standard_normal((num_parts, rows, width)).astype(np.float32)
    vectors = [jnp.asarray(rng.standard_normal(width), dtype) for _ in range(2)]
    return x, parts, vectors[0] if bias else None, vectors[1]


def reference(x, parts, bias, weight) -> tuple[np.ndarray, np.ndarray]:
    total = x.astype(np.float64) + np.asarray(parts).astype(np.float64).sum(axis=0)
    if bias is not None:
        total += np.asarray(bias).astype(np.float64)
    norm = total / np.sqrt((total**2).mean(axis=-1, keepdims=True) + EPS)
    return total, norm * np.asarray(weight).astype(np.float64)


@pytest.mark.parametrize("width", [64, 96, 576, 3584])
@pytest.mark.parametrize(("num_parts", "bias"), [(1, False), (3, True), (8, False)])
def test_parts_bias_and_residual_are_added_and_normalized(num_parts, bias, width):
    arguments = problem(num_parts, 5, width, bias=bias)
    for got, expected in zip(interpreted(*arguments), reference(*arguments), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_norm_has_the_dtype_of_its_weight_and_the_sum_is_float32(dtype):
    x, parts, *vectors = problem(2, 3, 96, bias=True, dtype=dtype)
    arguments = [x, jnp.asarray(parts, dtype), *vectors]
    total, norm = interpreted(*arguments)
    assert total.dtype == jnp.float32 and norm.dtype == dtype
    expected, expected_norm = reference(*arguments)
    np.testing.assert_allclose(total, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    rounded = jnp.asarray(expected_norm, dtype).astype(jnp.float32)
    np.testing.assert_allclose(norm.astype(jnp.float32), rounded, rtol=0.01, atol=1e-6)


def test_a_row_depends_on_itself_alone_bit_by_bit():
    x, parts, bias, weight = problem(4, 9, 96, bias=True)
    whole = [np.asarray(array) for array in interpreted(x, parts, bias, weight)]
    for kept in (1, 4):
        for got, expected in zip(interpreted(x[:kept], parts[:, :kept], bias, weight), whole, strict=True):
            np.testing.assert_array_equal(got, expected[:kept])
    parts[2, 1::2], x[3] = np.nan, np.inf
    for got, expected in zip(interpreted(x, parts, bias, weight), whole, strict=True):
        np.testing.assert_array_equal(got[::2], expected[::2])
        assert np.isnan(got[1::2]).all()


@pytest.mark.parametrize("rows", [96, 1536, 3072])  # one part, two, four
@pytest.mark.parametrize("split", [False, True])
def test_a_product_is_added_as_xla_adds_it_whether_or_not_it_is_split(rows, split):
    rng = np.random.default_rng(1)
    x, h = (jnp.asarray(rng.standard_normal((3, n)), jnp.float32) for n in (64, rows))
    w = jnp.asarray(rng.standard_normal((rows, 64)) * rows**-0.5, jnp.float32)
    bias, norm = (jnp.asarray(rng.standard_normal(64), jnp.float32) for _ in range(2))
    add = functools.partial(add_product, x, h, w, bias, norm, eps=EPS, split=split)
    for got, expected in zip(add(backend=INTERPRETED), add(backend=XLA), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_parts_of_a_quantized_product_are_added_too(quantization):
    rng = np.random.default_rng(2)
    x, h = (jnp.asarray(rng.standard_normal((3, n)), jnp.float32) for n in (64, 1152))
    w = quantize_matrix((rng.standard_normal((1152, 64)) / 34).astype(np.float32), quantization)
    norm = jnp.ones(64, jnp.float32)
    add = functools.partial(add_product, x, h, w, None, norm, eps=EPS, split=True)
    for got, expected in zip(add(backend=INTERPRETED), add(backend=XLA), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_parts_that_float16_cannot_hold_are_kept_in_float32():
    rng = np.random.default_rng(0)
    w = jnp.asarray(np.where(rng.random((1536, 64)) < 0.5, -6e4, 6e4), jnp.float16)
    h = jnp.asarray(rng.uniform(1, 2, (2, 1536)), jnp.float16)
    x, norm = jnp.zeros((2, 64)), jnp.ones(64, jnp.float16)
    (total, rows), (want, _) = (
        add_product(x, h, w, None, norm, eps=1e-5, backend=Backend(name), split=True)
        for name in ("pallas_interpret", "xla")
    )
    assert np.abs(want).max() > 65504 and np.isfinite(rows).all()
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
