"""One suite for every implementation of paged attention, against dense attention in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_cases import decode_of, make_case, prefill_of

from jpaged.ops.attention import Backend
from jpaged.pallas import decode as pallas_decode

BACKENDS = {"xla": Backend("xla"), "cpu": Backend("cpu"), "pallas": Backend("pallas_interpret")}
DECODE = {name: decode_of(backend) for name, backend in BACKENDS.items()}
PREFILL = {name: prefill_of(backend) for name, backend in BACKENDS.items()}

BLOCK_SIZES = {"xla": (1, 128, 256), "cpu": (1, 32, 128), "pallas": (32, 64)}

on_every_implementation = pytest.mark.parametrize("implementation", list(DECODE))


LENGTHS = (0, 1, 15, 16, 17, 0, 127, 128, 129, 130, 600, 31, 0)
DECODE_LENS = [(n, min(n, 1)) for n in LENGTHS]

# Whole prompts, chunks that start and end on and beside the edges of blocks and of tiles, decode
# rows among them, and sequences with nothing to do.
PREFILL_LENS = [
    (1, 1), (15, 15), (0, 0), (16, 16), (17, 17), (600, 1), (17, 1), (600, 45), (130, 130), (33, 16),
    (32, 17), (48, 31), (129, 1), (144, 16), (0, 0), (257, 130), (0, 0),
]  # fmt: skip

SHAPES = [(1, 80), (2, 64), (3, 96), (4, 128), (7, 64), (8, 256)]  # (group, head_dim)
MASKS = [dict(window=1), dict(window=5, soft_cap=4.0), dict(window=40)]


@on_every_implementation
class TestDecode:
    @pytest.mark.parametrize(("group", "head_dim"), SHAPES)
    def test_one_query_per_sequence_sees_its_whole_context(self, implementation, group, head_dim):
        case = make_case(DECODE_LENS, group=group, head_dim=head_dim, seed=group)
        out = case.run_decode(DECODE[implementation])
        case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])

    def test_a_row_of_length_zero_gives_zeros(self, implementation):
        out = make_case(DECODE_LENS).run_decode(DECODE[implementation])
        for row, length in zip(out, LENGTHS, strict=True):
            assert np.array_equal(row, np.zeros_like(row)) == (length == 0)

    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_windows_and_soft_caps(self, implementation, mask):
        case = make_case(DECODE_LENS, **mask)
        out = case.run_decode(DECODE[implementation])
        case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])

    def test_block_sizes(self, implementation):
        lens = [(n, 1) for n in (1, 127, 128, 129)]  # the longest ends one slot into a tile
        for block_size in BLOCK_SIZES[implementation]:
            case = make_case(lens, block_size=block_size)
            case.check([row[None] for row in case.run_decode(DECODE[implementation])])

    def test_a_long_context(self, implementation):
        case = make_case([(4092, 1), (3, 1)], kv_heads=1, width=256)
        case.check([row[None] for row in case.run_decode(DECODE[implementation])])

    def test_more_rows_than_one_group_of_tiles(self, implementation):
        case = make_case([(1 + 7 * n, 1) for n in range(37)], kv_heads=1)
        case.check([row[None] for row in case.run_decode(DECODE[implementation])])

    def test_a_row_has_the_same_bits_whatever_is_beside_it(self, implementation):
        case = make_case([(n, 1) for n in (40, 1, 600, 17)], width=50)
        together = case.run_decode(DECODE[implementation])
        for kept in range(4):
            lens = np.array([n if i == kept else 0 for i, (n, _) in enumerate(case.lens)], np.int32)
            q = np.stack([own[0] for own in case.q])
            alone = DECODE[implementation](q, case.k_pool, case.v_pool, case.tables, lens, **case.options())
            np.testing.assert_array_equal(np.asarray(alone)[kept], together[kept])


@pytest.mark.parametrize(
    ("implementation", "dtype"),  # what the CPU's does not read is refused: see tests/engine/test_backends.py
    [
        (name, dtype)
        for name in DECODE
        for dtype in ("bfloat16", "float16")
        if (name, dtype) != ("cpu", "float16")
    ],
)
def test_decode_from_pools_of_16_bits(implementation, dtype):
    case = make_case(DECODE_LENS, dtype=dtype, group=3, window=40)
    out = case.run_decode(DECODE[implementation])
    case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])


@on_every_implementation
class TestPrefill:
    @pytest.mark.parametrize(("group", "head_dim"), SHAPES)
    def test_chunks_and_decode_rows_see_their_contexts(self, implementation, group, head_dim):
        case = make_case(PREFILL_LENS, group=group, head_dim=head_dim, seed=group)
        got, padding = case.run_prefill(PREFILL[implementation], padding=13)
        case.check(got)
        assert padding.shape[0] == 13 and np.isfinite(padding).all()

    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_windows_and_soft_caps(self, implementation, mask):
        case = make_case(PREFILL_LENS, **mask)
        got, padding = case.run_prefill(PREFILL[implementation], padding=13)
        case.check(got)
        assert np.isfinite(padding).all()

    @pytest.mark.parametrize("platform", ["cpu", "gpu"])
    def test_pools_of_16_bits(self, implementation, platform):
        case = make_case(PREFILL_LENS, dtype="bfloat16", platform=platform, group=3, window=40)
        case.check(case.run_prefill(PREFILL[implementation], padding=13)[0])

    def test_block_sizes(self, implementation):
        for block_size in BLOCK_SIZES[implementation]:
            case = make_case([(300, 200), (129, 129), (128, 1), (1, 1)], block_size=block_size)
            case.check(case.run_prefill(PREFILL[implementation])[0])

    def test_a_long_context(self, implementation):
        case = make_case([(4092, 3), (3, 3), (4092, 1)], kv_heads=1, width=256)
        case.check(case.run_prefill(PREFILL[implementation])[0])

    def test_a_chunk_may_begin_anywhere(self, implementation):
        """One sequence of 50 tokens, cut at every position: all its second chunks at once."""
        whole = make_case([(50, 50)], kv_heads=1, width=4)
        starts = range(50)
        case = dataclasses.replace(
            whole,
            lens=[(50, 50 - start) for start in starts],
            q=[whole.q[0][start:] for start in starts],
            k=whole.k * 50,
            v=whole.v * 50,
            tables=np.repeat(whole.tables, 50, axis=0),
        )
        case.check(case.run_prefill(PREFILL[implementation])[0])

    def test_a_chunk_may_end_anywhere(self, implementation):
        """All first chunks at once: what lies after a chunk's end is poison, not yet written."""
        case = make_case([(end, end) for end in range(1, 50)], kv_heads=1)
        case.check(case.run_prefill(PREFILL[implementation])[0])

    def test_fewer_tokens_than_sequences_or_none_at_all(self, implementation):
        case = make_case([(0, 0)] * 9 + [(20, 2)] + [(0, 0)] * 30 + [(40, 1)], kv_heads=1, width=4)
        case.check(case.run_prefill(PREFILL[implementation], padding=2)[0])
        nothing = dataclasses.replace(case, lens=[(0, 0)] * 41, q=[own[:0] for own in case.q])
        _, padding = nothing.run_prefill(PREFILL[implementation], padding=5)
        assert padding.shape[0] == 5 and np.isfinite(padding).all()

    def test_a_token_of_a_chunk_gives_what_decoding_it_gives(self, implementation):
        case = make_case([(130, 40)], width=10)
        (whole,), _ = case.run_prefill(PREFILL[implementation])
        for index in (0, 17, 39):
            q, length = case.q[0][index], 130 - 40 + index + 1
            alone = DECODE[implementation](
                q[None], case.k_pool, case.v_pool, case.tables, np.array([length], np.int32), **case.options()
            )
            scale = np.abs(whole).max()
            np.testing.assert_allclose(np.asarray(alone)[0], whole[index], rtol=0, atol=1e-6 * scale)


QUANTIZED = [
    ("int8", "float32", 90),
    ("fp8_e4m3", "bfloat16", 90),
    ("fp8_e4m3", "float32", 80),
    ("int4", "bfloat16", 80),
]
QUANTIZED_SHAPES = [(3, 64), (2, 80), (4, 96), (2, 128)]  # (group, head_dim)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(("format", "dtype", "capability"), QUANTIZED)
class TestQuantizedPools:
    """The reference is dense attention over the values that are stored."""

    @pytest.mark.parametrize(("group", "head_dim"), QUANTIZED_SHAPES)
    def test_decode(self, implementation, format, dtype, capability, group, head_dim):
        lens = [(n, min(n, 1)) for n in (0, 1, 16, 17, 130, 600)]
        case = make_case(lens, format=format, dtype=dtype, group=group, head_dim=head_dim)
        backend = dataclasses.replace(BACKENDS[implementation], capability=capability)
        out = case.run_decode(decode_of(backend))
        case.check([row[None][:queries] for row, (_, queries) in zip(out, lens, strict=True)])

    def test_prefill(self, implementation, format, dtype, capability):
        lens = [(17, 17), (600, 1), (0, 0), (130, 45)]
        case = make_case(lens, format=format, dtype=dtype, group=2, window=40)
        backend = dataclasses.replace(BACKENDS[implementation], capability=capability)
        case.check(case.run_prefill(prefill_of(backend))[0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(k_pool=np.zeros((4, 3, 16, 64), np.float32)), "must match"),
        (dict(k_pool=np.zeros((4, 2, 16, 48), np.float32)), "must match"),
        (dict(dtype="bfloat16"), "must be dtype='bfloat16' or one of"),
        (dict(qkv=np.zeros((2, 3, 4, 64), np.float32)), "qkv.shape=.* must be .*kv_heads=2"),
        (dict(qkv=np.zeros((2, 2, 2, 64), np.float32)), "qkv.shape=.* must be .*query heads of each"),
        (
            dict(k_scale=np.zeros((4, 2, 16), np.float32)),
            "k_scale of a float32 pool must have the shape None",
        ),
    ],
)
def test_kernels_refuse_what_they_cannot_run(changes, match):
    pool = np.zeros((4, 2, 16, 64), np.float32)
    arguments = dict(
        qkv=np.zeros((2, 2, 4, 64), np.float32), k_pool=pool, v_pool=pool, dtype="float32", capability=90
    )
    with pytest.raises(ValueError, match=match):
        pallas_decode.paged_decode(
            tables=np.zeros((2, 2), np.int32), context_lens=np.zeros(2, np.int32), **(arguments | changes)
        )


def test_the_reference_itself_moves_far_for_one_slot():
    """If this fails the suite no longer tells an error of one slot."""
    for window in (None, 5):
        case = make_case([(40, 20)], window=window)
        right = case.expected()[0]
        for wrong in (
            dataclasses.replace(case, window=(window or 40) - 1),
            dataclasses.replace(case, k=[np.roll(case.k[0], 1, axis=0)], v=[np.roll(case.v[0], 1, axis=0)]),
        ):
            error = np.abs(wrong.expected()[0] - right).max(axis=(1, 2))  # by query
            assert (error > 0.3).sum() >= (1 if window is None else 16)
