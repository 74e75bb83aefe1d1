"""Quantized matrices: the error of rounding, products against NumPy, and what the program holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantized_cases import dequantized

from jpaged.config import QUANTIZATIONS
from jpaged.ops.attention import Backend
from jpaged.ops.layers import linear
from jpaged.ops.quantized import QuantizedMatrix, abstract_matrix, group_size, quantize_matrix


def weights(kind: str, shape=(576, 96)) -> np.ndarray:
    rng = np.random.default_rng(3)
    w = rng.normal(0, 0.02, shape)
    if kind == "outliers":
        w[rng.random(shape) < 0.002] *= 50
    if kind == "one-sided":
        w = np.abs(w) + 0.1
    if kind == "zero columns":
        w[:, ::2] = 0
    return w.astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "one-sided", "zero columns"])
@pytest.mark.parametrize("rows", [576, 256, 96])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_value_is_within_its_scale(kind, rows, quantization):
    w = weights(kind, (rows, 96))
    q = quantize_matrix(w, quantization)
    assert q.group == {"int8": rows, "int4": {576: 64, 256: 128, 96: 32}[rows]}[quantization]
    bound = np.repeat(np.asarray(q.scale), q.group, axis=0) * (0.5 if quantization == "int8" else 1)
    assert (np.abs(dequantized(q) - w) <= bound * 1.0001).all()
    groups = w.reshape(-1, q.group, 96)
    if quantization == "int8":
        width = np.abs(groups).max(1) / 127
    else:
        width = (np.maximum(groups.max(1), 0) - np.minimum(groups.min(1), 0)) / 15
    np.testing.assert_allclose(np.asarray(q.scale), np.where(width > 0, width, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "quantization", "bound"),
    [
        ("gaussian", "int8", 0.01),
        ("gaussian", "int4", 0.11),
        ("outliers", "int8", 0.1),
        ("outliers", "int4", 0.25),
    ],
)
def test_relative_error(kind, quantization, bound):
    w = weights(kind)
    error = np.linalg.norm(dequantized(quantize_matrix(w, quantization)) - w) / np.linalg.norm(w)
    assert bound / 4 < error < bound


@pytest.mark.parametrize("rows", [576, 1536, 96, 37 * 32])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 64])
def test_the_product_is_that_of_the_dequantized_matrix(rows, quantization, num_tokens):
    q = quantize_matrix(weights("outliers", (rows, 80)), quantization)
    x = np.random.default_rng(num_tokens).normal(size=(num_tokens, rows)).astype(np.float32)
    b = np.arange(80, dtype=np.float32)
    want = x.astype(np.float64) @ dequantized(q) + b
    np.testing.assert_allclose(np.asarray(linear(x, q, b)), want, rtol=1e-5, atol=1e-5)


def random_matrix(bits, rows, group, scale, zero, *, columns=80, ordered=False) -> QuantizedMatrix:
    rng = np.random.default_rng(rows + group)
    shape = (rows // group, columns)
    if bits == 8:
        data = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    else:
        data = rng.integers(0, 256, (rows // 2, columns)).astype(np.uint8)
    zeros = {
        None: None,
        "uint8": rng.integers(0, 16, shape).astype(np.uint8),
        "float32": rng.normal(0, 8, shape).astype(np.float32),
    }[zero]
    order = rng.permutation(rows).astype(np.int32) if ordered else None
    return QuantizedMatrix(
        data, rng.uniform(0.5, 2, shape).astype(scale), zeros, bits, group, "float32", order
    )


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("bits", "rows", "group", "scale", "zero"),
    [
        (8, 96, 32, "float16", None),
        (8, 1536, 128, "float32", "float32"),
        (8, 1536, 1536, "float16", None),
        (8, 1536, 1536, "float16", "float32"),
        (8, 1400, 700, "float32", None),
        (4, 96, 32, "float16", "uint8"),
        (4, 96, 32, "float32", "float32"),
        (4, 576, 64, "float16", None),
        (4, 60, 6, "float32", "uint8"),
        (4, 1536, 1536, "float16", "uint8"),
        (4, 1400, 700, "float32", "float32"),
        (4, 1048, 1048, "float32", None),
    ],
)
def test_any_group_order_and_zero_point(bits, rows, group, scale, zero, ordered):
    w = random_matrix(bits, rows, group, scale, zero, ordered=ordered)
    x = np.random.default_rng(0).normal(size=(5, rows)).astype(np.float32)
    want = x.astype(np.float64) @ dequantized(w)
    got = np.asarray(jax.jit(linear)(x, jax.tree.map(jnp.asarray, w)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_operands_have_the_matrixs_dtype(quantization):
    q = quantize_matrix(weights("gaussian").astype(ml_dtypes.bfloat16), quantization)
    assert q.dtype == "bfloat16"
    x = np.random.default_rng(0).normal(size=(5, 576)).astype(ml_dtypes.bfloat16)
    got, want = np.asarray(linear(x, q)), x.astype(np.float64) @ dequantized(q)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=0.01)
    assert np.abs(got - want).max() > 0 or quantization == "int8"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("rows", [1536, 2048])
def test_no_whole_matrix_of_floats_is_in_the_program(quantization, rows):
    w = abstract_matrix(rows, 640, quantization, "bfloat16")
    x = jax.ShapeDtypeStruct((8, rows), jnp.float32)
    check_no_whole_matrix(x, w, rows)


@pytest.mark.parametrize(
    ("bits", "group", "zero"), [(4, 1536, "uint8"), (8, 1536, "float32"), (8, 64, None), (4, 32, "float32")]
)
def test_nor_with_other_groups(bits, group, zero):
    w = random_matrix(bits, 1536, group, "float16", zero, columns=640, ordered=True)
    check_no_whole_matrix(jax.ShapeDtypeStruct((8, 1536), jnp.float32), w, 1536)


def check_no_whole_matrix(x, w, rows):
    compiled = jax.jit(linear).lower(x, w).compile()
    for dtype in ("bf16", "f32", "f16"):
        assert f"{dtype}[{rows},640]" not in compiled.as_text()
        assert f"{dtype}[640,{rows}]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * rows * 640


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_few_rows_take_the_kernel_where_there_are_kernels_and_the_matrix_fits(quantization):
    def takes_kernel(backend, num_tokens, rows=64, columns=96) -> bool:
        x = jax.ShapeDtypeStruct((num_tokens, rows), jnp.float32)
        w = abstract_matrix(rows, columns, quantization, "bfloat16")
        return "pallas_call" in str(jax.make_jaxpr(lambda x, w: linear(x, w, backend=Backend(backend)))(x, w))

    assert takes_kernel("pallas", 1) and takes_kernel("pallas", 64) and takes_kernel("pallas_interpret", 64)
    assert not takes_kernel("pallas", 65) and not takes_kernel("xla", 1)
    assert not takes_kernel("pallas", 1, columns=80)


def test_faults_are_told_by_name():
    with pytest.raises(ValueError, match="quantization='int3' must be one of"):
        group_size(64, "int3")
    with pytest.raises(ValueError, match="multiple of 32, this one has 48"):
        group_size(48, "int4")
    for quantization in QUANTIZATIONS:
        with pytest.raises(ValueError, match="not finite"):
            quantize_matrix(np.full((32, 2), np.inf, np.float32), quantization)
