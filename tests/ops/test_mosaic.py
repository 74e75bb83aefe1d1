"""The Mosaic GPU decode kernel in jax's GPU interpreter: few and small cases, for it is slow."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import as_qkv, make_case

from jpaged.pallas.decode_mosaic import Tuning, paged_decode_mosaic

# Rings that wrap, and contexts of several ranges.
SMALL = Tuning(tile_blocks=2, tiles=2, split_blocks=6, max_splits=3)


def check(lens: list[int], tuning: Tuning, **options) -> None:
    case = make_case([(n, min(n, 1)) for n in lens], kv_heads=1, **options)
    for table, length in zip(case.tables, lens, strict=True):
        table[-(-length // 16) :] = 10**6  # no block of the pool: to copy it would raise

    def decode(q, k_pool, v_pool, *arguments, **options):
        pools = (jnp.asarray(pool.data) for pool in (k_pool, v_pool))
        options |= dict(dtype=k_pool.dtype, tuning=tuning, interpret=True)
        return paged_decode_mosaic(as_qkv(q, k_pool.num_heads), *pools, *arguments, **options)

    out = case.run_decode(decode)
    case.check([row[None][: min(n, 1)] for row, n in zip(out, lens, strict=True)])
    for row, length in zip(out, lens, strict=True):
        assert np.array_equal(row, np.zeros_like(row)) == (length == 0)


def test_contexts_of_no_tile_to_many():
    check([0, 1, 33, 330], SMALL)


def test_windows_and_soft_caps():
    check(
        [0, 33, 180, 150],
        SMALL,
        group=1,
        head_dim=128,
        dtype="bfloat16",
        platform="gpu",
        window=40,
        soft_cap=8.0,
    )


def test_a_group_of_two_warpgroups():
    check([50], Tuning(tile_blocks=1, tiles=2, split_blocks=32, max_splits=1), group=5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(group=9), "group=9 query heads"),
        (dict(head_dim=80), "head_dim=80 must be one of"),
        (dict(block_size=32), "block_size=32 must be 16"),
        (dict(dtype="float16"), "dtype='float16' must be one of"),
        (dict(pool="int8"), "must be dtype='float32' for"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_run(changes, match):
    shape = dict(group=2, head_dim=64, block_size=16, dtype="float32", pool="float32") | changes
    pool = np.zeros((4, 2, shape["block_size"], shape["head_dim"]), shape["pool"])
    qkv = np.zeros((1, 2, shape["group"] + 2, shape["head_dim"]), np.float32)
    with pytest.raises(ValueError, match=match):
        paged_decode_mosaic(
            qkv, pool, pool, np.zeros((1, 2), np.int32), np.zeros(1, np.int32), dtype=shape["dtype"]
        )
