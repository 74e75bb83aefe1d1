"""Normalization, products, rotary embedding and activation against NumPy in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.config import RopeConfig
from jpaged.ops.layers import (
    apply_rope,
    linear,
    rms_norm,
    rope_frequencies,
    rope_table,
    silu_gate,
    unembed,
)

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
rng = np.random.default_rng(0)


def close(got, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert got.dtype == jnp.float32 and got.shape == expected.shape
    np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 16)])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape, dtype):
    x = (10 * rng.standard_normal(shape)).astype(np.float32)
    x[0] *= 1e-4  # so small that eps matters
    weight = rng.standard_normal(shape[-1]).astype(DTYPES[dtype])
    exact = x.astype(np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)
    close(rms_norm(x, weight, 1e-5), exact * weight.astype(np.float64))


def test_rms_norm_is_computed_in_float32_whatever_comes():
    """In float16 the squares would overflow."""
    x = np.full((1, 8), 300, np.float16)
    close(rms_norm(x, np.ones(8, np.float16), 1e-6), np.ones((1, 8)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_round_their_operands_to_the_weight_and_sum_in_float32(dtype):
    x, w = rng.standard_normal((7, 300)).astype(np.float32), rng.standard_normal((300, 11))
    w, b = w.astype(DTYPES[dtype]), rng.standard_normal(11).astype(DTYPES[dtype])
    rounded = x.astype(DTYPES[dtype]).astype(np.float64)
    exact = rounded @ w.astype(np.float64)
    close(linear(x, w), exact)
    close(linear(x, w, b), exact + b.astype(np.float64))
    close(unembed(x, np.ascontiguousarray(w.T)), exact)


def test_the_gate_comes_first():
    gate, up = rng.standard_normal((2, 3, 10))
    exact = gate / (1 + np.exp(-gate)) * up
    close(silu_gate(jnp.asarray(np.concatenate([gate, up], axis=1), jnp.float32)), exact)


# ---------------------------------------------------------------------------------------------
# Rotary embedding

HEAD_DIM = 16


def base(theta: float = 10000.0, head_dim: int = HEAD_DIM) -> np.ndarray:
    return np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def check_frequencies(rope: RopeConfig, expected: np.ndarray, scale: float = 1.0) -> None:
    got, got_scale = rope_frequencies(rope, 2 * len(expected))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    assert got_scale == pytest.approx(scale, rel=1e-12)


def test_default_frequencies():
    check_frequencies(RopeConfig(), base())
    check_frequencies(RopeConfig(theta=1e6), base(1e6, 64))
    check_frequencies(RopeConfig(kind="dynamic", factor=4.0, original_max_position=64), base())


def test_linear_frequencies_are_divided_by_the_factor():
    check_frequencies(RopeConfig(kind="linear", factor=4.0), base() / 4)


def test_llama3_stretches_long_waves_keeps_short_ones_and_blends_between():
    rope = RopeConfig(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    expected, kinds = [], set()
    for frequency in base(100.0):
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            expected.append(frequency)
            kinds.add("kept")
        elif wavelength > 64 / 1:
            expected.append(frequency / 8)
            kinds.add("stretched")
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
            kinds.add("blended")
    assert kinds == {"kept", "stretched", "blended"}
    check_frequencies(RopeConfig(**(vars(rope) | {"theta": 100.0})), np.array(expected))


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_interpolates_what_turns_rarely(truncate):
    """Dimensions that turn more than beta_fast times in the original context are kept."""
    rope = RopeConfig(
        kind="yarn", theta=500.0, factor=4.0, original_max_position=128, beta_fast=8.0, beta_slow=1.0,
        truncate=truncate,
    )  # fmt: skip

    def dimension(turns: float) -> float:
        """Where the frequency is such that it turns that often: solved for the index."""
        return 32 / 2 * math.log(128 / (2 * math.pi * turns)) / math.log(500.0)

    low, high = dimension(8.0), dimension(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    assert 0 < low < high < 16
    ramp = np.clip((np.arange(16) - low) / (high - low), 0, 1)
    frequencies = base(500.0, 32)
    expected = frequencies * (1 - ramp) + frequencies / 4 * ramp
    assert (ramp == 0).any() and (ramp == 1).any()
    check_frequencies(rope, expected, 0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        (dict(attention_factor=0.5), 0.5),
        (dict(mscale=0.707, mscale_all_dim=0.707), 1.0),
        (dict(mscale=1.0, mscale_all_dim=0.5), (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        (dict(factor=1.0), 1.0),
    ],
    ids=str,
)
def test_yarn_scales_attention_as_configured(options, scale):
    values = dict(kind="yarn", factor=4.0, original_max_position=128) | options
    assert rope_frequencies(RopeConfig(**values), 32)[1] == pytest.approx(scale, rel=1e-12)


def test_rotation_is_a_multiplication_of_complex_numbers():
    """The pairs are (i, i + D / 2)."""
    positions = np.array([0, 1, 7, 500], np.int32)
    x = rng.standard_normal((4, 3, HEAD_DIM)).astype(np.float32)
    cos, sin = rope_table(jnp.asarray(positions), base().astype(np.float32), 1.5)
    assert cos.shape == sin.shape == (4, HEAD_DIM // 2)
    pairs = x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :].astype(np.complex128)
    turned = pairs * 1.5 * np.exp(1j * positions[:, None] * base()[None, :])[:, None]
    close(apply_rope(x, cos, sin), np.concatenate([turned.real, turned.imag], axis=-1), 1e-5)


def test_scores_depend_on_the_distance_alone():
    q, k = rng.standard_normal((2, 1, 1, HEAD_DIM)).astype(np.float32)
    inv_freq, scale = rope_frequencies(RopeConfig(), HEAD_DIM)

    @jax.jit
    def score(i, j):
        turn = [apply_rope(x, *rope_table(p[None], inv_freq, scale)) for x, p in ((q, i), (k, j))]
        return jnp.vdot(*turn, precision="highest")

    near, same, far = (float(score(np.int32(i), np.int32(j))) for i, j in ((7, 3), (104, 100), (110, 100)))
    assert near == pytest.approx(same, abs=1e-4) and abs(near - far) > 1e-2
