"""The kernel for quantized products, in Pallas' interpreter, against NumPy in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.attention import Backend
from jpaged.ops.layers import linear
from jpaged.ops.quantized import QuantizedMatrix
from jpaged.pallas.quantized_matmul import MAX_ROWS, Matrix, Tuning, default_tuning, quantized_matmul

RNG = np.random.default_rng(5)
FORMATS = [(8, None), (8, 128), (8, 64), (8, 32), (4, 128), (4, 64), (4, 32)]  # bits, group; None: all rows


def matrix(bits: int, group: int | None, rows=256, columns=96, scale_dtype=np.float32, zero_dtype=np.uint8):
    """A quantized matrix and its values in float64."""
    group = group or rows
    low, high = (-128, 128) if bits == 8 else (0, 16)
    q = RNG.integers(low, high, (rows, columns))
    scale = RNG.uniform(0.5, 2, (rows // group, columns)).astype(scale_dtype)
    zero = RNG.integers(0, 16, scale.shape) + (0.37 if zero_dtype == np.float32 else 0)
    zero = zero.astype(zero_dtype) if bits == 4 else None
    shift = 0 if zero is None else np.repeat(zero.astype(np.float64), group, axis=0)
    values = (q - shift) * np.repeat(scale.astype(np.float64), group, axis=0)
    if bits == 8:
        data = q.astype(np.int8)
    else:
        halves = q.astype(np.uint8).reshape(-1, 2, group // 2, columns)
        data = (halves[:, 0] | halves[:, 1] << 4).reshape(-1, columns)
    return dict(data=data, scale=scale, zero=zero, bits=bits, group=group), values


@functools.partial(jax.jit, static_argnames=("bits", "group", "tuning"))
def interpreted(x, data, scale, zero, *, bits, group, tuning=None):
    return quantized_matmul(x, data, scale, zero, bits=bits, group=group, tuning=tuning, interpret=True)


def product(x: jax.Array, w: dict[str, Any], tuning: Tuning | None = None) -> np.ndarray:
    return np.asarray(interpreted(x, **w, tuning=tuning)).sum(axis=0)


def rows_of_x(num_rows: int, rows: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(MAX_ROWS, rows))[:num_rows], dtype)


def relative_error(got: np.ndarray, x: jax.Array, values: np.ndarray) -> float:
    """Of the whole product, in the Frobenius norm, x as it was rounded."""
    want = np.asarray(x).astype(np.float64) @ values
    assert got.shape == want.shape and got.dtype == np.float32
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_product_is_that_of_the_dequantized_matrix(bits, group):
    w, values = matrix(bits, group)
    x = rows_of_x(17, 256, "float32")
    assert relative_error(product(x, w), x, values) < 1e-6
    rounded = rows_of_x(17, 256, "bfloat16")
    # The integers are exact: rounding x is all that 16 bits cost.
    assert relative_error(product(rounded, w), rounded, values) < 1e-6
    assert relative_error(product(rounded, w), x, values) < 1e-2


@pytest.mark.parametrize("num_rows", [1, 3, 16, 33, 64])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
def test_any_number_of_rows(bits, group, num_rows):
    w, values = matrix(bits, group)
    x = rows_of_x(num_rows, 256, "float32")
    assert relative_error(product(x, w), x, values) < 1e-6


@pytest.mark.parametrize(("rows", "columns"), [(576, 32), (96, 160), (2080, 128)])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_widths_that_fill_no_tile_or_split_evenly(rows, columns, bits, group):
    w, values = matrix(bits, group, rows, columns)
    x = rows_of_x(5, rows, "float16")
    assert relative_error(product(x, w), x, values) < 1e-6


@pytest.mark.parametrize("zero_dtype", [np.uint8, np.float32, None])
def test_scales_of_16_bits_and_zeros_of_any_kind(zero_dtype):
    w, values = matrix(4, 64, scale_dtype=np.float16, zero_dtype=zero_dtype or np.uint8)
    if zero_dtype is None:
        values += np.repeat(w["zero"] * w["scale"].astype(np.float64), 64, axis=0)
        w["zero"] = None
    x = rows_of_x(7, 256, "bfloat16")
    assert relative_error(product(x, w), x, values) < 1e-6


@pytest.mark.parametrize(("bits", "group", "dtype"), [(8, None, "bfloat16"), (4, 128, "float32")])
def test_a_row_depends_on_itself_alone_bit_by_bit(bits, group, dtype):
    w, _ = matrix(bits, group, columns=32)
    x, run = rows_of_x(64, 256, dtype), functools.partial(product, w=w, tuning=Tuning(32, 32, 2, 2, 1))
    whole = run(x)
    for num_rows in (1, 16, 33):
        np.testing.assert_array_equal(run(x[:num_rows]), whole[:num_rows])
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(run(x[order]), whole[order])
    spoiled = run(x.at[1::2].set(jnp.nan))
    np.testing.assert_array_equal(spoiled[::2], whole[::2])
    assert np.isnan(spoiled[1::2]).all()


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_every_row_of_the_matrix_is_in_one_range(splits):
    w, values = matrix(4, 64, rows=448, columns=32)  # 7 groups: some ranges are shorter, some empty
    x = rows_of_x(4, 448, "float32")
    assert relative_error(product(x, w, Tuning(32, 32, splits, 1, 1)), x, values) < 1e-6


def test_a_matrix_is_split_where_its_tiles_would_not_fill_a_gpu():
    def programs(rows, columns, dtype="bfloat16"):
        tuning = default_tuning(Matrix(rows, columns, 4, 128, dtype))
        assert tuning.depth * tuning.columns >= 512 * tuning.num_warps  # 16 bytes for each thread
        return columns // tuning.columns * tuning.splits, tuning.splits

    assert programs(3584, 37888) == (296, 1)
    assert programs(3584, 3584) == (196, 7)
    assert programs(18944, 3584) == (280, 10)
    assert programs(3584, 3584, "float32")[1] == 3


def test_what_the_kernel_cannot_do_is_told_by_name():
    w, _ = matrix(4, 64)
    for changes, match in [
        (dict(bits=3), "bits=3 must be 4 or 8"),
        (dict(group=48), "group=48 must be 128, 64 or 32"),
        (dict(data=w["data"][:, :40]), "rows=256 and columns=40 must be multiples of 32"),
    ]:
        with pytest.raises(ValueError, match=match):
            product(rows_of_x(2, 256, "float32"), w | changes)
    with pytest.raises(ValueError, match="group=128 must divide rows=576"):
        product(rows_of_x(2, 576, "float32"), w | dict(group=128))
    with pytest.raises(ValueError, match="num_rows=65 must be at most 64"):
        product(jnp.zeros((65, 256)), w)
    with pytest.raises(ValueError, match="dtype='int32' must be one of"):
        product(jnp.zeros((2, 256), jnp.int32), w)
    with pytest.raises(ValueError, match="depth=48 must be a power of two"):
        Tuning(64, 48, 1, 4, 4)


@pytest.mark.parametrize("zeros", [None, "uint8", "float32"])
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (8, 32), (8, 256), (4, 256)])
def test_layouts_of_checkpoints_have_the_xla_forms_products_whether_or_not_the_kernel_reads_them(
    bits, group, zeros
):
    rng, (rows, columns) = np.random.default_rng(1), (256, 64)
    factors = (rows // group, columns)
    zero = None if zeros is None else jnp.asarray(rng.integers(0, 15, factors), zeros)
    w = QuantizedMatrix(
        data=jnp.asarray(rng.integers(0, 100, (rows * bits // 8, columns)), "int8" if bits == 8 else "uint8"),
        scale=jnp.asarray(rng.random(factors), "float16"),
        zero=zero,
        bits=bits,
        group=group,
        dtype="float32",
        order=jnp.asarray(rng.permutation(rows)),
    )
    x = jnp.asarray(rng.standard_normal((3, rows)), "float32")
    expected, found = (linear(x, w, backend=Backend(name)) for name in ("xla", "pallas_interpret"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max())
