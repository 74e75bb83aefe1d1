"""What the CPU's compiled attention has beyond the contract of tests/ops/test_attention.py."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
from attention_cases import decode_of, make_case

from jpaged.ops import attention_cpu
from jpaged.ops.attention import Backend


def decode(case) -> np.ndarray:
    return case.run_decode(decode_of(Backend("cpu")))


def test_calls_at_the_same_time_do_not_meet():
    """Parts of many calls go through one pool of threads."""
    case = make_case([(n, 1) for n in (600, 1, 17, 0, 40, 300, 299, 4)], kv_heads=3)
    run = decode_of(Backend("cpu"))
    expected = case.run_decode(run)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: case.run_decode(run), range(200)))
    for each in found:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("pool", "poison"), [("k_pool", np.nan), ("v_pool", np.nan), ("v_pool", np.inf)])
def test_what_is_not_finite_spoils_its_own_row_alone(pool, poison, dtype):
    case = make_case([(40, 1), (33, 1), (70, 1)], kv_heads=2, dtype=dtype)
    expected = decode(case)
    data = getattr(case, pool).data
    bits = np.float32(poison).view(np.uint32)
    entry = np.uint16(bits >> 16) if data.dtype == np.uint16 else np.float32(poison)
    data[case.tables[1, 0], 1, 3, 5] = entry
    found = decode(case)
    group = found.shape[1] // 2
    assert not np.isfinite(found[1, group:]).all(axis=-1).any()  # of the queries of that KV head
    np.testing.assert_array_equal(found[1, :group], expected[1, :group])
    np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])


def test_scores_far_apart_and_large():
    """The exponential of the softmax over its whole range: against one in double precision."""
    x = np.concatenate([np.linspace(-300, 300, 1009), [1e30, -1e30, -np.inf]]).astype(np.float32)
    for scores in (x[:1009], x, x[:700], np.full(5, -1e20, np.float32)):
        found = scores.copy()
        attention_cpu._softmax(found, np.empty(len(x), np.int32))
        weights = np.exp(scores.astype(np.float64) - scores.max())
        np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-5, atol=1e-37)
