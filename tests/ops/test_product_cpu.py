"""The CPU's compiled product against NumPy in float64, and its promise that rows do not see each other."""

from __future__ import annotations

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops import product_cpu
from jpaged.ops.layers import PackedMatrix, linear, unembed

rng = np.random.default_rng(0)
multiply = jax.jit(lambda x, w, num_rows: w.product(x, num_rows))


def matrices(rows: int, depth: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    return (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (depth, columns)))


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


SHAPES = [(rows, 48, 80) for rows in range(1, 14)]
SHAPES += [
    (5, depth, 40) for depth in (1, 7, product_cpu.DEPTH, product_cpu.DEPTH + 1, 3 * product_cpu.DEPTH)
]
SHAPES += [(7, 20, columns) for columns in (1, 15, 16, 17, 31, 32, 33, 500)]
SHAPES += [(300, 900, 130)]  # several blocks of rows, several parts


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_products_are_those_of_numpy(rows, depth, columns):
    x, w = matrices(rows, depth, columns)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    found = multiply(x, PackedMatrix.of(w), rows)
    assert found.shape == (rows, columns) and found.dtype == jnp.float32
    size = np.abs(x).astype(np.float64) @ np.abs(w)
    assert (np.abs(found - exact) <= 2e-6 * size).all()


@pytest.mark.parametrize(("depth", "columns"), [(576, 100), (900, 33)])
def test_a_row_does_not_depend_on_the_others(depth, columns):
    x, w = matrices(200, depth, columns)
    w = PackedMatrix.of(w)
    together = bits(multiply(x, w, 200))
    for rows in (1, 2, 3, 5, 6, 7, 16, 64, 87):
        np.testing.assert_array_equal(bits(multiply(x[:rows], w, rows)), together[:rows])
        np.testing.assert_array_equal(bits(multiply(x[-rows:], w, rows)), together[-rows:])


@pytest.mark.parametrize("count", [0, 1, 6, 13, 20])
def test_rows_that_do_not_matter_are_zero(count):
    x, w = matrices(20, 64, 50)
    w = PackedMatrix.of(w)
    expected = np.where(np.arange(20)[:, None] < count, multiply(x, w, 20), 0)
    x[count:] = np.nan
    np.testing.assert_array_equal(multiply(x, w, count), expected)


def test_what_is_not_finite_spoils_its_own_row_and_column_alone():
    x, w = matrices(9, 40, 45)
    expected = np.asarray(multiply(x, PackedMatrix.of(w), 9))
    x[4, 7], w[3, 44] = np.nan, np.inf
    found = np.asarray(multiply(x, PackedMatrix.of(w), 9))
    spoiled = (np.arange(9) == 4)[:, None] | (np.arange(45) == 44)
    assert not np.isfinite(found[spoiled]).any()
    np.testing.assert_array_equal(found[~spoiled], expected[~spoiled])


def test_calls_at_the_same_time_do_not_meet():
    """Parts of many calls go through one pool of threads."""
    cases = []
    for rows in (3, 40, 64, 100):
        x, w = matrices(rows, 300, 700)
        w = PackedMatrix.of(w)
        cases.append((x, w, bits(multiply(x, w, rows))))

    def repeat(index: int) -> int:
        x, w, expected = cases[index % len(cases)]
        return sum(np.array_equal(bits(multiply(x, w, len(x))), expected) for _ in range(50))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(repeat, range(16))) == [50] * 16


def test_layers_take_a_packed_matrix_for_the_matrix_itself():
    x, w = matrices(11, 48, 90)
    b = rng.standard_normal(90).astype(np.float32)
    packed = PackedMatrix.of(w)
    assert packed.dtype == jnp.float32
    np.testing.assert_allclose(linear(x, packed, b), linear(x, w, b), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(unembed(x, packed), unembed(x, w.T), rtol=1e-5, atol=1e-5)
    ids = np.array([0, 89, 17, 16, 17], np.int32)
    np.testing.assert_array_equal(packed.columns(ids), w[:, ids].T)
