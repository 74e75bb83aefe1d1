"""One suite for every implementation of paged attention, against dense attention in float64.

Every slot that may not be read holds NaN or an infinity. Keys are built so that the slots at the
edges of what a query sees weigh most, and those just beyond would weigh all: one slot too many or
too few is an error of the order of the values themselves.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.ops import attention
from jpaged.ops.attention import Backend
from jpaged.pallas import decode as pallas_decode
from jpaged.pallas import prefill as pallas_prefill

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # of the largest value
VISIBLE, HIDDEN = 6.0, 12.0  # scores of the edge slots that a query sees, and of those just beyond


OPTIONS = ("dtype", "window", "soft_cap")


def decode_of(backend: Backend):
    return jax.jit(functools.partial(attention.paged_decode, backend), static_argnames=OPTIONS)


def prefill_of(backend: Backend):
    def prefill(q, k_pool, v_pool, tables, query_start, context_lens, **options):
        attend = attention.paged_prefill(backend, tables, query_start, context_lens, q.shape[0])
        return attend(q, k_pool, v_pool, **options)

    return jax.jit(prefill, static_argnames=OPTIONS)


BACKENDS = {"xla": Backend("xla"), "pallas": Backend("pallas_interpret")}
DECODE = {name: decode_of(backend) for name, backend in BACKENDS.items()}
PREFILL = {name: prefill_of(backend) for name, backend in BACKENDS.items()}

BLOCK_SIZES = {"xla": (1, 128, 256), "pallas": (32, 64)}

on_every_implementation = pytest.mark.parametrize("implementation", list(DECODE))


@dataclasses.dataclass
class Case:
    """Sequences in a pool, and what their queries should give.

    Attributes:
      q: per sequence, float32 [queries, H, D]; the last ones of the context.
      k, v: per sequence, float32 [context, K, D], as rounded to `dtype`.
      k_pool, v_pool: as stored.
    """

    lens: list[tuple[int, int]]  # (context, queries)
    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    k_pool: np.ndarray
    v_pool: np.ndarray
    tables: np.ndarray
    dtype: str
    window: int | None
    soft_cap: float | None

    def expected(self) -> list[np.ndarray]:
        """Dense attention of each sequence in float64: [queries, H, D]."""
        return [self._dense(*sequence) for sequence in zip(self.q, self.k, self.v, strict=True)]

    def _dense(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,thd->hqt", q, k) / np.sqrt(q.shape[-1])
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        position = np.arange(len(k) - len(q), len(k))[:, None]
        key = np.arange(len(k))[None, :]
        seen = key <= position
        if self.window is not None:
            seen &= key > position - self.window
        scores = np.where(seen[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if len(q) else scores
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqt,thd->qhd", weights, v)

    def check(self, got: list[np.ndarray]) -> None:
        expected = self.expected()
        scale = max(np.abs(x).max() for x in expected if x.size)
        assert scale > 1
        for lens, g, e in zip(self.lens, got, expected, strict=True):
            assert g.shape == e.shape
            np.testing.assert_allclose(
                g, e, rtol=0, atol=TOLERANCE[self.dtype] * scale, err_msg=f"(context, queries) = {lens}"
            )

    def options(self) -> dict:
        return dict(dtype=self.dtype, window=self.window, soft_cap=self.soft_cap)

    # -- running it ---------------------------------------------------------------------------

    def run_decode(self, implementation: str) -> np.ndarray:
        """All sequences, each with at most one query: [S, H, D]."""
        q = np.zeros((len(self.lens), *self.q[0].shape[1:]), np.float32)
        for row, own in zip(q, self.q, strict=True):
            row[:] = own[0] if len(own) else np.nan  # the query of an empty row is not read either
        lens = np.array([context for context, _ in self.lens], np.int32)
        out = DECODE[implementation](q, self.k_pool, self.v_pool, self.tables, lens, **self.options())
        assert out.dtype == jnp.float32
        return np.asarray(out)

    def run_prefill(self, implementation: str, *, padding: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
        """All sequences packed, then `padding` tokens: results per sequence, and those of padding."""
        counts = [queries for _, queries in self.lens]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        q = np.concatenate([*self.q, np.ones((padding, *self.q[0].shape[1:]), np.float32)])
        lens = np.array([context for context, _ in self.lens], np.int32)
        out = PREFILL[implementation](q, self.k_pool, self.v_pool, self.tables, start, lens, **self.options())
        assert out.dtype == jnp.float32
        pieces = np.split(np.asarray(out), start[1:])
        return pieces[:-1], pieces[-1]


def edge_keys(rng, direction: np.ndarray, common: np.ndarray, window: int | None) -> np.ndarray:
    """Keys [context, K, D] for queries along `direction[t] + common`, all vectors of length about 1.

    Slot j scores `VISIBLE` with the queries that see it as their first or last slot, and `HIDDEN`
    with those for which it is one before the first or one after the last.
    """
    length = len(direction)
    keys = 0.2 * rng.standard_normal(direction.shape)

    def add(slot: int, query: int, score: float) -> None:
        if 0 <= slot < length and 0 <= query < length:
            keys[slot] += score * direction[query]

    for t in range(length):
        add(t, t, VISIBLE)
        add(t + 1, t, HIDDEN)
        if window is not None:
            add(t - window + 1, t, VISIBLE)
            add(t - window, t, HIDDEN)
    if length:
        keys[0] += VISIBLE * common
    return keys


def make_case(
    lens: list[tuple[int, int]],
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    stored: str | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    width: int | None = None,
    seed: int = 0,
) -> Case:
    """Sequences in permuted blocks of a pool whose every other slot is poisoned.

    Args:
      stored: dtype of the pool's array, by default uint16 for 16-bit values.
      width: of the block tables.
    """
    rng = np.random.default_rng(seed)
    value_type = DTYPES[dtype]
    counts = [-(-context // block_size) for context, _ in lens]
    width = width or max(counts) + 2
    num_blocks = sum(counts) + 4
    poison = rng.choice([np.nan, np.inf, -np.inf], (2, num_blocks, kv_heads, block_size, head_dim))
    k_pool, v_pool = poison.astype(value_type)
    tables = np.zeros((len(lens), width), np.int32)
    blocks = rng.permutation(np.arange(1, num_blocks)).tolist()

    q, k, v = [], [], []
    for (context, queries), count, table in zip(lens, counts, tables, strict=True):
        own = [blocks.pop() for _ in range(count)]
        table[:count] = own
        shape = (context, kv_heads, head_dim)
        direction = rng.standard_normal(shape)
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        common = rng.standard_normal((kv_heads, head_dim))
        common /= np.linalg.norm(common, axis=-1, keepdims=True)
        keys = edge_keys(rng, direction, common, window).astype(value_type)
        values = rng.standard_normal(shape).astype(value_type)
        for slot in range(context):
            k_pool[own[slot // block_size], :, slot % block_size] = keys[slot]
            v_pool[own[slot // block_size], :, slot % block_size] = values[slot]
        # q · k / sqrt(D) is the score that edge_keys means.
        query = np.sqrt(head_dim) * (direction + common[None])[context - queries :]
        query = np.repeat(query, group, axis=1) + 0.3 * rng.standard_normal(
            (queries, kv_heads * group, head_dim)
        )
        q.append(query.astype(value_type).astype(np.float32))
        k.append(keys.astype(np.float32))
        v.append(values.astype(np.float32))
    stored = stored or ("uint16" if k_pool.itemsize == 2 else dtype)
    k_pool, v_pool = (pool.view(DTYPES.get(stored, np.uint16)) for pool in (k_pool, v_pool))
    return Case(lens, q, k, v, k_pool, v_pool, tables, dtype, window, soft_cap)


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
        out = case.run_decode(implementation)
        case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])

    def test_a_row_of_length_zero_gives_zeros(self, implementation):
        out = make_case(DECODE_LENS).run_decode(implementation)
        for row, length in zip(out, LENGTHS, strict=True):
            assert np.array_equal(row, np.zeros_like(row)) == (length == 0)

    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_windows_and_soft_caps(self, implementation, mask):
        case = make_case(DECODE_LENS, **mask)
        out = case.run_decode(implementation)
        case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])

    @pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "uint16"), ("float16", "uint16")])
    def test_pools_of_16_bits(self, implementation, dtype, stored):
        case = make_case(DECODE_LENS, dtype=dtype, stored=stored, group=3, window=40)
        out = case.run_decode(implementation)
        case.check([row[None][:queries] for row, (_, queries) in zip(out, case.lens, strict=True)])

    def test_block_sizes(self, implementation):
        lens = [(n, 1) for n in (1, 127, 128, 129)]  # the longest ends one slot into a tile
        for block_size in BLOCK_SIZES[implementation]:
            case = make_case(lens, block_size=block_size)
            case.check([row[None] for row in case.run_decode(implementation)])

    def test_a_long_context(self, implementation):
        case = make_case([(4092, 1), (3, 1)], kv_heads=1, width=256)
        case.check([row[None] for row in case.run_decode(implementation)])

    def test_more_rows_than_one_group_of_tiles(self, implementation):
        case = make_case([(1 + 7 * n, 1) for n in range(37)], kv_heads=1)
        case.check([row[None] for row in case.run_decode(implementation)])

    def test_a_row_has_the_same_bits_whatever_is_beside_it(self, implementation):
        case = make_case([(n, 1) for n in (40, 1, 600, 17)], width=50)
        together = case.run_decode(implementation)
        for kept in range(4):
            lens = np.array([n if i == kept else 0 for i, (n, _) in enumerate(case.lens)], np.int32)
            q = np.stack([own[0] for own in case.q])
            alone = DECODE[implementation](q, case.k_pool, case.v_pool, case.tables, lens, **case.options())
            np.testing.assert_array_equal(np.asarray(alone)[kept], together[kept])


@on_every_implementation
class TestPrefill:
    @pytest.mark.parametrize(("group", "head_dim"), SHAPES)
    def test_chunks_and_decode_rows_see_their_contexts(self, implementation, group, head_dim):
        case = make_case(PREFILL_LENS, group=group, head_dim=head_dim, seed=group)
        got, padding = case.run_prefill(implementation, padding=13)
        case.check(got)
        assert padding.shape[0] == 13 and np.isfinite(padding).all()

    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_windows_and_soft_caps(self, implementation, mask):
        case = make_case(PREFILL_LENS, **mask)
        got, padding = case.run_prefill(implementation, padding=13)
        case.check(got)
        assert np.isfinite(padding).all()

    @pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "uint16"), ("bfloat16", "bfloat16")])
    def test_pools_of_16_bits(self, implementation, dtype, stored):
        case = make_case(PREFILL_LENS, dtype=dtype, stored=stored, group=3, window=40)
        case.check(case.run_prefill(implementation, padding=13)[0])

    def test_block_sizes(self, implementation):
        for block_size in BLOCK_SIZES[implementation]:
            case = make_case([(300, 200), (129, 129), (128, 1), (1, 1)], block_size=block_size)
            case.check(case.run_prefill(implementation)[0])

    def test_a_long_context(self, implementation):
        case = make_case([(4092, 3), (3, 3), (4092, 1)], kv_heads=1, width=256)
        case.check(case.run_prefill(implementation)[0])

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
        case.check(case.run_prefill(implementation)[0])

    def test_a_chunk_may_end_anywhere(self, implementation):
        """All first chunks at once: what lies after a chunk's end is poison, not yet written."""
        case = make_case([(end, end) for end in range(1, 50)], kv_heads=1)
        case.check(case.run_prefill(implementation)[0])

    def test_fewer_tokens_than_sequences_or_none_at_all(self, implementation):
        case = make_case([(0, 0)] * 9 + [(20, 2)] + [(0, 0)] * 30 + [(40, 1)], kv_heads=1, width=4)
        case.check(case.run_prefill(implementation, padding=2)[0])
        nothing = dataclasses.replace(case, lens=[(0, 0)] * 41, q=[own[:0] for own in case.q])
        _, padding = nothing.run_prefill(implementation, padding=5)
        assert padding.shape[0] == 5 and np.isfinite(padding).all()

    def test_a_token_of_a_chunk_gives_what_decoding_it_gives(self, implementation):
        case = make_case([(130, 40)], width=10)
        (whole,), _ = case.run_prefill(implementation)
        for index in (0, 17, 39):
            q, length = case.q[0][index], 130 - 40 + index + 1
            alone = DECODE[implementation](
                q[None], case.k_pool, case.v_pool, case.tables, np.array([length], np.int32), **case.options()
            )
            scale = np.abs(whole).max()
            np.testing.assert_allclose(np.asarray(alone)[0], whole[index], rtol=0, atol=1e-6 * scale)


def quantize(pool: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A pool [N, K, P, D] as `kind` with bfloat16 scales [N, K, P], and the values that these mean."""
    value_type, largest = {"int8": (np.int8, 127), "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448)}[kind]
    known = np.where(np.isfinite(pool), pool, 0)
    scale = (np.abs(known).max(axis=-1) / largest).astype(ml_dtypes.bfloat16)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    scaled = np.clip(known / scale[..., None], -largest, largest)
    stored = (np.rint(scaled) if kind == "int8" else scaled).astype(value_type)
    meant = stored.astype(np.float32) * scale[..., None]
    # Slots that nobody may read: a scale of NaN, and values of NaN where there is such a thing.
    poisoned = ~np.isfinite(pool).all(axis=-1)
    scale[poisoned] = np.nan
    stored[poisoned] = 99 if kind == "int8" else np.nan
    return stored, scale.astype(ml_dtypes.bfloat16), meant


def quantized_case(lens, kind: str, **options) -> tuple[Case, dict]:
    """A case whose pools hold 8-bit values, and the scales that go with them."""
    case = make_case(lens, **options)
    (k_pool, k_scale, k_meant), (v_pool, v_scale, v_meant) = (
        quantize(pool.view(DTYPES[case.dtype]).astype(np.float32), kind)
        for pool in (case.k_pool, case.v_pool)
    )
    block_size = k_pool.shape[2]

    def contexts(meant):
        return [
            np.stack([meant[table[t // block_size], :, t % block_size] for t in range(context)])
            if context
            else np.zeros((0, *meant.shape[1::2]), np.float32)
            for (context, _), table in zip(lens, case.tables, strict=True)
        ]

    exact = dataclasses.replace(case, k=contexts(k_meant), v=contexts(v_meant), k_pool=k_pool, v_pool=v_pool)
    return exact, dict(k_scale=k_scale, v_scale=v_scale)


QUANTIZED = [("int8", "float32", 90), ("float8_e4m3fn", "bfloat16", 90), ("float8_e4m3fn", "float32", 80)]


@pytest.mark.parametrize(("kind", "dtype", "capability"), QUANTIZED)
class TestQuantizedPools:
    """Pools of 8 bits: the reference is dense attention over the values that are stored."""

    def test_decode(self, kind, dtype, capability):
        lens = [(n, min(n, 1)) for n in (0, 1, 16, 17, 130, 600)]
        case, scales = quantized_case(lens, kind, dtype=dtype, group=3)
        q = np.stack([own[0] if len(own) else np.full(own.shape[1:], np.nan, np.float32) for own in case.q])
        out = pallas_decode.paged_decode(
            q,
            jnp.asarray(case.k_pool),
            jnp.asarray(case.v_pool),
            case.tables,
            np.array([n for n, _ in lens], np.int32),
            capability=capability,
            interpret=True,
            **scales,
            **case.options(),
        )
        case.check([row[None][:queries] for row, (_, queries) in zip(np.asarray(out), lens, strict=True)])

    def test_prefill(self, kind, dtype, capability):
        lens = [(17, 17), (600, 1), (0, 0), (130, 45)]
        case, scales = quantized_case(lens, kind, dtype=dtype, group=2, window=40)
        start = np.concatenate([[0], np.cumsum([queries for _, queries in lens])]).astype(np.int32)
        out = pallas_prefill.paged_prefill(
            np.concatenate(case.q),
            jnp.asarray(case.k_pool),
            jnp.asarray(case.v_pool),
            case.tables,
            start,
            np.array([n for n, _ in lens], np.int32),
            capability=capability,
            interpret=True,
            **scales,
            **case.options(),
        )
        case.check(np.split(np.asarray(out), start[1:-1]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(k_pool=np.zeros((4, 3, 16, 64), np.float32)), "must match"),
        (dict(k_pool=np.zeros((4, 2, 16, 48), np.float32)), "must match"),
        (dict(dtype="bfloat16"), "must be dtype='bfloat16' or one of"),
        (dict(q=np.zeros((2, 3, 64), np.float32)), "num_heads=3 must be a multiple of kv_heads=2"),
        (
            dict(k_scale=np.zeros((4, 2, 16), np.float32)),
            "k_scale of a float32 pool must have the shape None",
        ),
    ],
)
def test_kernels_refuse_what_they_cannot_run(changes, match):
    pool = np.zeros((4, 2, 16, 64), np.float32)
    arguments = dict(
        q=np.zeros((2, 4, 64), np.float32), k_pool=pool, v_pool=pool, dtype="float32", capability=90
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
