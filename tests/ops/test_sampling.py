"""The sampler on the device against NumPy in float64, in the order that SamplingParams documents."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged import batch as b
from jpaged.batch import NO_CANDIDATE, NON_FINITE, RowState, SamplingBatch, init_row_state
from jpaged.ops import sampling
from jpaged.ops.sampling import NUM_CANDIDATES, Variant, sample, token_logprobs
from jpaged.sampling_params import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, SamplingParams

SMALL, LARGE = 100, 49152

run = jax.jit(sample, static_argnames="variant")


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence that is about to draw a token."""

    params: SamplingParams = SamplingParams()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    hold_stop: bool = False
    penalties: bool | None = None  # whether they apply; `None` leaves it to the parameters
    seed: int = 0
    choice: int = 0
    position: int = 0


def make_batch(rows: list[Row], size: int, lines: int) -> tuple[np.ndarray, RowState, SamplingBatch]:
    """What the device has of `rows`, in reverse order so that rows are not lines; the rest is padding.

    Returns:
      the row of each line, the state of all rows, and the batch.
    """
    state = jax.tree.map(np.copy, _empty_state(lines, size))
    row_of = np.full(lines, lines, np.int32)
    row_of[: len(rows)] = range(len(rows) - 1, -1, -1)
    floats, ints = np.zeros((lines, 6), np.float32), np.zeros((lines, 6), np.int32)
    floats[len(rows) :] = 0, 1, 0, 1, 0, 0
    ints[len(rows) :, 0] = size
    for line, row in enumerate(rows):
        p, r = row.params, row_of[line]
        floats[line] = (
            p.temperature,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        )
        flags = b.FLAG_HOLD_STOP * row.hold_stop
        flags |= b.FLAG_ALLOWED * (p.allowed_token_ids is not None)
        flags |= b.FLAG_EXTRAS * bool(p.logit_bias or row.bad_words)
        flags |= b.FLAG_PENALTIES * (p.needs_counts if row.penalties is None else row.penalties)
        seed = np.array([row.seed >> 32, row.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        ints[line] = (p.top_k if 0 < p.top_k < size else size, *seed, row.choice, row.position, flags)
        state.output_counts[r] = np.bincount(np.array(row.output, int), minlength=size)
        state.in_prompt[r] = bits(row.prompt, size)
        state.allowed[r] = bits(p.allowed_token_ids or (), size)
        bias = p.logit_bias or {}
        state.bias_ids[r, : len(bias)], state.bias[r, : len(bias)] = list(bias), list(bias.values())
        state.stop_ids[r, : len(p.stop_token_ids)] = p.stop_token_ids
        for place, word in enumerate(row.bad_words):
            state.bad_words[r, place, -len(word) :] = word
        recent = row.output[-(MAX_BAD_WORD_TOKENS - 1) :]
        state.recent[r, state.recent.shape[1] - len(recent) :] = recent
    return row_of, state, SamplingBatch(floats=floats, ints=ints)


@functools.cache
def _empty_state(num_rows: int, size: int) -> RowState:
    return jax.tree.map(np.asarray, init_row_state(num_rows, size))


def bits(ids, size: int) -> np.ndarray:
    present = np.zeros(size, bool)
    present[list(ids)] = True
    return np.packbits(present, bitorder="little")


def draw(logits: np.ndarray, rows: list[Row], variant: Variant, function=run):
    """Tokens, log-probabilities and new state of `rows`; one row of logits serves all.

    The work is done in a few shapes, so that little is compiled; log-probabilities and state are
    those of the last piece.
    """
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(rows), np.shape(logits)[-1]))
    lines = 8 if len(rows) <= 8 or logits.shape[-1] > SMALL else 128
    tokens = []
    for first in range(0, len(rows), lines):
        own = rows[first : first + lines]
        row_of, state, batch = make_batch(own, logits.shape[-1], lines)
        padded = np.zeros((lines, logits.shape[-1]), np.float32)
        padded[: len(own)] = logits[first : first + lines]
        drawn, logprobs, state = function(padded, row_of, state, batch, variant=variant)
        tokens += drawn[: len(own)].tolist()
    return np.array(tokens), logprobs, state


# ---------------------------------------------------------------------------------------------
# The reference


def reference_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Masks, bias and penalties, in float64."""
    p, size = row.params, len(logits)
    x = logits.astype(np.float64)
    if p.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(size), p.allowed_token_ids)] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for word in row.bad_words:
        if len(word) == 1 or row.output[-len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if row.hold_stop:
        x[list(p.stop_token_ids)] = -np.inf
    counts = np.bincount(row.output, minlength=size)
    seen = np.isin(np.arange(size), row.prompt + row.output)
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    return x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def reference_support(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens the filters leave: bool [V]. What float32 cannot tell from 0 is never drawn."""
    scaled = logits.astype(np.float64) / params.temperature
    kept = scaled - scaled.max() > np.log(np.finfo(np.float32).tiny)
    kept &= scaled - scaled.max() >= np.log(params.min_p) if params.min_p > 0 else True
    if 0 < params.top_k < kept.sum():
        kept &= scaled >= np.sort(scaled[kept])[-params.top_k]
    if params.top_p < 1:
        descending = np.sort(scaled[kept])[::-1]
        mass = np.exp(descending - descending[0])
        reached = np.cumsum(mass) >= params.top_p * mass.sum()
        kept &= scaled >= descending[np.argmax(reached)]
    return kept


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.where(reference_support(logits, params), np.exp(scaled - scaled.max()), 0)
    return weights / weights.sum()


# ---------------------------------------------------------------------------------------------
# Masks, bias and penalties

PROMPT, OUTPUT = (5, 5, 7, 90, 8), (7, 8, 8, 8, 40, 41, 99)

PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition below one": SamplingParams(repetition_penalty=0.4),
    "presence": SamplingParams(presence_penalty=1.5),
    "negative presence": SamplingParams(presence_penalty=-1.5),
    "frequency": SamplingParams(frequency_penalty=0.75),
    "negative frequency": SamplingParams(frequency_penalty=-2.0),
    "all": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
}

MASKS = {
    "allowed": Row(SamplingParams(allowed_token_ids=[0, 3, 8, 17, 98, 99])),
    "bias": Row(SamplingParams(logit_bias={0: 100.0, 5: -100.0, 99: 0.5})),
    "bias of what is masked": Row(SamplingParams(allowed_token_ids=[3, 4], logit_bias={3: -1.0, 5: 100.0})),
    "bad words": Row(
        output=OUTPUT,
        bad_words=(
            (11,),
            (99, 12),  # the last token is its first
            (41, 99, 13),
            (40, 99, 14),  # not the last tokens
            (8, 8, 40, 41, 99, 15),
            (7, 8, 8, 8, 40, 41, 99, 16),  # as long as can be
            (8, 8, 8, 8, 40, 41, 99, 17),
        ),
    ),
    "bad words at the start": Row(prompt=(1, 2, 3), bad_words=((11,), (3, 12), (2, 3, 13))),
    "stop ids held": Row(SamplingParams(stop_token_ids=[0, 5, 99]), hold_stop=True),
    "stop ids not held": Row(SamplingParams(stop_token_ids=[0, 5, 99])),
}

ROWS = [Row(p, PROMPT, OUTPUT) for p in PENALTIES.values()] + list(MASKS.values())
ROWS += [Row(), Row(SamplingParams(logit_bias={7: 3.0}, repetition_penalty=2.0), PROMPT, OUTPUT)]


@pytest.fixture(scope="module")
def processed():
    """Logits after masks, bias and penalties, of all `ROWS` at once."""
    raw = 3 * np.random.default_rng(0).standard_normal((len(ROWS), SMALL)).astype(np.float32)

    @jax.jit
    def process(logits, lines, state, batch):
        masked = sampling._apply_masks_and_bias(logits, lines, state, batch)
        return sampling._apply_penalties(masked, lines, state, batch)

    return raw, np.asarray(process(raw, *make_batch(ROWS, SMALL, len(ROWS))))


@pytest.mark.parametrize("index", range(len(ROWS)), ids=[*PENALTIES, *MASKS, "plain", "bias and repetition"])
def test_masks_bias_and_penalties_are_the_reference(processed, index):
    raw, got = processed
    expected = reference_logits(raw[index], ROWS[index])
    np.testing.assert_allclose(got[index], expected, rtol=1e-6, atol=1e-6)
    if ROWS[index] not in (Row(), MASKS["stop ids not held"], MASKS["bad words at the start"]):
        assert (got[index] != raw[index]).sum() > 1


def test_repetition_sees_prompt_and_output_but_the_other_penalties_only_output(processed):
    raw, got = processed
    changed = {
        name: set(np.flatnonzero(row != before).tolist())
        for name, row, before in zip(PENALTIES, got, raw, strict=False)
    }
    assert changed["repetition"] == {5, 7, 90, 8, 40, 41, 99}
    assert changed["presence"] == changed["frequency"] == {7, 8, 40, 41, 99}


def test_a_greedy_row_takes_the_argmax_of_what_masks_and_penalties_leave():
    raw = 3 * np.random.default_rng(1).standard_normal((len(ROWS), SMALL)).astype(np.float32)
    rows = [dataclasses.replace(r, params=dataclasses.replace(r.params, temperature=0)) for r in ROWS]
    tokens, _, _ = draw(raw, rows, Variant.FULL)
    assert tokens.tolist() == [int(reference_logits(x, r).argmax()) for x, r in zip(raw, rows, strict=True)]


def test_penalties_of_no_effect_change_no_bit():
    raw = np.random.default_rng(2).standard_normal((1, SMALL)).astype(np.float32)
    rows = [Row(SamplingParams(), PROMPT, OUTPUT, penalties=True)]
    got = jax.jit(sampling._apply_penalties)(raw, *make_batch(rows, SMALL, 1))
    assert np.asarray(got).tobytes() == raw.tobytes()


# ---------------------------------------------------------------------------------------------
# What is noted for the next step


def test_a_drawn_token_is_noted_in_its_row_alone():
    logits = np.zeros((3, SMALL), np.float32)
    logits[[0, 1, 2], [10, 20, 30]] = 5
    greedy = SamplingParams(temperature=0)
    counted = dataclasses.replace(greedy, presence_penalty=0.1)
    rows = [Row(counted, output=(10, 1)), Row(greedy, output=(3,)), Row(counted, output=(4,) * 9)]
    row_of, state, batch = make_batch(rows, SMALL, 8)
    assert row_of.tolist() == [2, 1, 0, 8, 8, 8, 8, 8]
    row_of[2] = 8  # nobody wants the third token
    logits = np.concatenate([logits, np.zeros((5, SMALL), np.float32)])
    tokens, _, new = run(logits, row_of, state, batch, variant=Variant.FULL)
    assert tokens[:3].tolist() == [10, 20, 30]
    assert new.last_token[:3].tolist() == [0, 20, 10]
    expected = np.array(state.output_counts)
    expected[2, 10] += 1
    np.testing.assert_array_equal(np.asarray(new.output_counts)[:8], expected[:8])
    assert new.recent[2].tolist() == [-2, -2, -2, -2, 10, 1, 10]
    assert new.recent[1].tolist() == [-2, -2, -2, -2, -2, 3, 20]
    assert new.recent[0].tolist() == [4] * 7


def test_variants_without_masks_note_the_last_token_and_nothing_else():
    logits = np.zeros((8, SMALL), np.float32)
    logits[:2, 42] = 50
    rows = [Row(SamplingParams(presence_penalty=0.1)), Row()]
    for variant in (Variant.GREEDY, Variant.SAMPLED):
        row_of, state, batch = make_batch(rows, SMALL, 8)
        _, logprobs, new = run(logits, row_of, state, batch, variant=variant)
        assert logprobs is None
        assert new.last_token.tolist() == [42, 42, 0, 0, 0, 0, 0, 0, 0]
        for name in ("output_counts", "recent", "in_prompt", "bad_words"):
            np.testing.assert_array_equal(getattr(new, name), getattr(state, name))


# ---------------------------------------------------------------------------------------------
# Filters


@pytest.fixture(scope="module")
def lowest() -> object:
    """`sample` with every uniform number 0: the token of smallest id that the filters leave."""
    return _with_uniform(0.0)


@pytest.fixture(scope="module")
def highest() -> object:
    """`sample` with the largest uniform number: the token of largest id that the filters leave."""
    return _with_uniform(float(np.nextafter(np.float32(1), np.float32(0))))


def _with_uniform(value: float):
    def patched(logits, lines, state, batch, *, variant):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_uniform", lambda batch: jnp.full(batch.position.shape, value))
            return sample(logits, lines, state, batch, variant)

    return jax.jit(patched, static_argnames="variant")


def is_kept(lowest, logits: np.ndarray, params: SamplingParams, tokens: np.ndarray) -> np.ndarray:
    """Whether each of `tokens` can be drawn: it can if it is drawn when it stands first."""
    rolled = np.stack([np.roll(logits, -token) for token in tokens])
    got, _, _ = draw(rolled, [Row(params)] * len(tokens), Variant.SAMPLED, lowest)
    return got == 0


def spread(size: int, seed: int = 0) -> np.ndarray:
    return (2.5 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


FILTERS = [
    {},
    *({"top_k": k} for k in (0, -1, 1, 5, 64, 65, 99, 100, 101, 10**7)),
    *({"top_p": p} for p in (1e-9, 0.1, 0.5, 0.9, 0.99, 0.99999, 1.0)),
    *({"min_p": p} for p in (0.0, 1e-4, 0.3, 1.0)),
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 2.0, "min_p": 0.3, "top_k": 3},
    {"temperature": 2.0, "min_p": 0.01, "top_k": 30},
    {"temperature": 2.0, "min_p": 0.05, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1e-5},
    {"temperature": 50.0, "top_p": 0.9},
    {"temperature": 50.0, "top_k": 70, "top_p": 0.95},
    {"temperature": 1e6, "top_k": 90, "top_p": 0.5},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_what_the_filters_leave_of_a_small_vocabulary(lowest, options):
    logits, params = spread(SMALL), SamplingParams(**options)
    kept = is_kept(lowest, logits, params, np.arange(SMALL))
    expected = reference_support(logits, params)
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(expected).tolist()


FLAT = {"temperature": 20.0}  # so flat that a few candidates hold little of the probability

LARGE_FILTERS = [
    *({"top_k": k} for k in (1, 5, 63, 64, 65, 1000, LARGE - 1, LARGE, LARGE + 1)),
    *({"top_p": p} for p in (0.05, 0.5, 0.9, 0.999)),
    *(FLAT | {"top_p": p} for p in (0.001, 0.1, 0.5, 0.97)),
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 2.0, "min_p": 0.3, "top_k": 10},
    {"temperature": 2.0, "min_p": 0.05, "top_k": 500, "top_p": 0.7},
    FLAT | {"min_p": 0.8, "top_p": 0.6},
    FLAT | {"top_k": 30000, "top_p": 0.6},
]


@pytest.mark.parametrize("options", LARGE_FILTERS, ids=str)
def test_what_the_filters_leave_of_a_large_vocabulary(lowest, options):
    """The tokens around the edge, by rank: those that are just kept, and those that just are not."""
    logits, params = spread(LARGE), SamplingParams(**options)
    by_rank = np.argsort(-logits, kind="stable")
    count = int(reference_support(logits, params).sum())
    around = [0, count - 3, count - 2, count - 1, count, count + 1, count + 2, LARGE - 1]
    ranks = np.clip(around, 0, LARGE - 1)
    kept = is_kept(lowest, logits, params, by_rank[ranks])
    assert kept.tolist() == (ranks < count).tolist()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"top_k": 1}, 3),
        ({"top_k": 3}, 3),
        ({"top_k": 4}, 43),
        ({"top_k": 43}, 43),
        ({"top_k": 44}, 100),
        ({"top_p": 0.01}, 3),
        ({"top_p": 0.5}, 43),  # the three hold 0.1, with the forty 0.6
        ({"top_p": 0.7}, 100),
        ({"min_p": 1.0}, 3),
        ({"min_p": 1.0, "top_k": 1, "top_p": 0.01}, 3),
        ({"temperature": 1e-4}, 3),
    ],
    ids=str,
)
def test_tokens_that_tie_at_a_threshold_are_all_kept(lowest, options, count):
    logits = np.full(SMALL, 0.0, np.float32)
    logits[[7, 50, 99]], logits[10:50] = 1.6, 0.75
    kept = is_kept(lowest, logits, SamplingParams(**options), np.arange(SMALL))
    assert kept.sum() == count
    assert kept[[7, 50, 99]].all() and (count < 43 or kept[10:50].all())


def test_ties_beyond_the_candidates_are_kept_too(lowest):
    logits = np.zeros(LARGE, np.float32)
    logits[1000:1200] = 5.0
    assert 200 > NUM_CANDIDATES
    tokens = np.array([999, 1000, 1001, 1100, 1198, 1199, 1200, 0])
    for options in ({"top_k": 5}, {"top_k": 150}, {"top_p": 0.1}, {"top_p": 0.3}, {"min_p": 0.5}):
        kept = is_kept(lowest, logits, SamplingParams(**options), tokens)
        assert kept.tolist() == [False, True, True, True, True, True, False, False], options
    kept = is_kept(lowest, logits, SamplingParams(top_k=201), tokens)
    assert kept.all()


@pytest.mark.parametrize("top_k", [64, 65, 70, 71, 98, 99])
def test_neighbouring_floats_are_told_apart(lowest, top_k):
    logits = -np.arange(SMALL, dtype=np.float32) * np.float32(2**-23) - 1
    logits[0] = 0
    assert len(set(logits.tolist())) == SMALL
    kept = is_kept(lowest, logits, SamplingParams(top_k=top_k), np.arange(SMALL))
    assert np.flatnonzero(kept).tolist() == list(range(top_k))


def test_top_k_counts_what_min_p_left_and_top_p_what_both_left(lowest):
    """Probabilities 0.4, 0.3, 0.1 six times 0.05 at temperature 1."""
    logits = np.log(np.array([0.4, 0.3, 0.1] + [0.05] * 4)).astype(np.float32)
    logits = np.concatenate([logits, np.full(93, -60, np.float32)])
    for options, expected in (
        ({"top_p": 0.65}, [0, 1]),  # 0.4 + 0.3 of 1
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.2, "top_p": 0.75}, [0, 1]),  # 0.4 + 0.3 of 0.8 are 0.875
        ({"top_k": 2, "top_p": 0.65}, [0, 1]),
        ({"top_k": 2, "top_p": 0.55}, [0]),  # 0.4 of 0.7 are 0.571
        ({"min_p": 0.2, "top_k": 10}, [0, 1, 2]),
        ({"min_p": 0.01, "top_k": 2}, [0, 1]),
    ):
        kept = is_kept(lowest, logits, SamplingParams(**options), np.arange(SMALL))
        assert np.flatnonzero(kept).tolist() == expected, options


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_largest_uniform_number_draws_a_token_that_is_left(highest, size):
    """Where rounding makes the running sum fall short of its total."""
    for seed in range(3):
        logits = spread(size, seed)
        for options in ({}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 20.0}):
            params = SamplingParams(**options)
            kept = reference_support(logits, params)
            rolls = [0, 1, 17, size // 2, 255, 256, 3, 5]
            rolled = np.stack([np.roll(logits, shift) for shift in rolls])
            tokens, _, _ = draw(rolled, [Row(params)] * len(rolls), Variant.SAMPLED, highest)
            assert kept[(tokens - np.array(rolls)) % size].all()
            if options:
                last = [np.flatnonzero(np.roll(kept, shift))[-1] for shift in rolls]
                assert (tokens <= last).all()


def test_masked_tokens_are_never_drawn_whatever_the_filters(lowest):
    logits = np.full(SMALL, -np.inf, np.float32)
    logits[[20, 60, 61]] = 1.0, 0.5, -200.0
    for options in ({}, {"top_k": 50}, {"top_k": 99}, {"top_p": 0.9999999}, {"min_p": 1e-9}):
        allowed = SamplingParams(allowed_token_ids=[20, 60, 61], **options)
        got = draw(spread(SMALL), [Row(allowed, seed=s) for s in range(128)], Variant.FULL)[0]
        assert set(got.tolist()) <= {20, 60, 61}
    assert len(set(got.tolist())) > 1


# ---------------------------------------------------------------------------------------------
# The draw


def chi_square(drawn: np.ndarray, expected: np.ndarray) -> float:
    """p-value of draws against probabilities, tokens of low expectation pooled."""
    counts, wanted = np.bincount(drawn, minlength=len(expected)), expected * len(drawn)
    assert counts[expected == 0].sum() == 0, "a token was drawn that cannot be"
    common = wanted >= 8
    observed = np.append(counts[common], counts[~common].sum())
    theory = np.append(wanted[common], wanted[~common].sum())
    if theory[-1] < 8:
        observed, theory = observed[:-1], theory[:-1] * observed[:-1].sum() / theory[:-1].sum()
    assert len(observed) > 1
    statistic = ((observed - theory) ** 2 / theory).sum()
    return float(stats.chi2.sf(statistic, len(observed) - 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"top_k": 5},
        {"top_k": 80},
        {"top_p": 0.8},
        {"temperature": 30.0, "top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 2.0, "min_p": 0.05, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(options):
    logits, params = spread(SMALL, 5), SamplingParams(**options)
    rows = [Row(params, seed=10**9 + i % 5, choice=i % 3, position=i) for i in range(6016)]
    tokens, _, _ = draw(logits, rows, Variant.SAMPLED)
    assert chi_square(tokens, reference_distribution(logits, params)) > 1e-3


def test_draws_from_a_large_vocabulary_follow_its_distribution():
    """Tokens are pooled by where they stand, so that both levels of the search are seen."""
    logits, params = spread(LARGE, 6), SamplingParams(temperature=5.0)
    expected = reference_distribution(logits, params)
    rows = [Row(params, seed=3, position=position) for position in range(2400)]
    tokens, _, _ = draw(logits, rows, Variant.SAMPLED)
    index = np.arange(LARGE)
    for pool in (index // 1024, index % 256 // 4):  # which block of 256, and where in it
        assert chi_square(pool[tokens], np.bincount(pool, expected)) > 1e-3
    assert len(set(tokens.tolist())) > 2000


def test_wrong_distributions_are_told_from_the_right_one():
    """If this fails the tests above accept anything."""
    logits, params = spread(SMALL, 5), SamplingParams(temperature=1.5)
    rows = [Row(params, seed=1, position=i) for i in range(6000)]
    tokens, _, _ = draw(logits, rows, Variant.SAMPLED)
    assert chi_square(tokens, reference_distribution(logits, SamplingParams(temperature=1.4))) < 1e-3


def test_a_draw_depends_on_seed_choice_and_position_and_on_nothing_else():
    logits = np.zeros(SMALL, np.float32)
    keys = [
        dict(seed=seed, choice=choice, position=position)
        for seed in (0, 1, 2**32, 2**32 + 1, 2**63 - 1)
        for choice in (0, 1)
        for position in (0, 1, 1000)
    ]
    together = draw(logits, [Row(**key) for key in keys], Variant.SAMPLED)[0]
    reversed_ = draw(logits, [Row(**key) for key in reversed(keys)], Variant.SAMPLED)[0]
    assert together.tolist() == reversed_[::-1].tolist()
    others = [Row(SamplingParams(top_p=0.3), seed=s) for s in range(10)]
    for key, token in list(zip(keys, together, strict=True))[::7]:
        assert draw(logits, [*others[:5], Row(**key), *others[5:]], Variant.FULL)[0][5] == token
    # 30 draws from 100: were one of the three ignored, at most 15 would differ.
    assert len(set(together.tolist())) > 20


def test_each_row_honours_its_own_options():
    logits = spread(SMALL, 8)
    options = [
        SamplingParams(temperature=0, top_k=50),
        SamplingParams(temperature=1, top_k=5),
        SamplingParams(temperature=1, top_p=0.1),
        SamplingParams(temperature=3),
        SamplingParams(temperature=3, min_p=0.5),
        SamplingParams(temperature=0, top_p=0.2, min_p=0.1),
        SamplingParams(temperature=3, top_k=70),
    ]
    rows = [Row(options[i % 7], seed=9, position=i) for i in range(7 * 300)]
    tokens = draw(logits, rows, Variant.SAMPLED)[0].reshape(-1, 7).T
    for own, params in zip(tokens, options, strict=True):
        if params.greedy:
            assert set(own.tolist()) == {int(logits.argmax())}
        else:
            expected = reference_distribution(logits, params)
            assert expected[own].all()  # nothing that the filters drop
            assert (expected > 0).sum() == 1 or chi_square(own, expected) > 1e-3


def test_a_greedy_row_takes_the_first_of_equal_tokens():
    logits = np.zeros((2, SMALL), np.float32)
    logits[0, [40, 30, 99]] = 2
    tokens, _, _ = draw(logits, [Row(SamplingParams(temperature=0))] * 2, Variant.GREEDY)
    assert tokens.tolist() == [30, 0]


def test_extreme_logits_and_temperatures_stay_finite():
    logits = np.full(SMALL, -1e36, np.float32)
    logits[[3, 4]] = 1e36, 0.99e36
    for temperature in (1e-5, 1.0, 1e6):
        rows = [Row(SamplingParams(temperature=temperature, top_p=0.9), seed=s) for s in range(50)]
        assert set(draw(logits, rows, Variant.SAMPLED)[0].tolist()) == {3}


# ---------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("size", [SMALL, LARGE, 7])
def test_log_probabilities_are_those_of_float64(size):
    rng = np.random.default_rng(3)
    logits = (4 * rng.standard_normal((5, size)) + np.array([0, 50, -50, 1e4, 0])[:, None]).astype(np.float32)
    tokens = np.array([0, size - 1, 3, int(logits[3].argmax()), int(logits[4].argmin())], np.int32)
    got = jax.jit(token_logprobs)(logits, tokens)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    chosen = exact[np.arange(5), tokens]
    tolerance = 1e-5 + 2e-7 * np.abs(logits).max(axis=1)
    assert (np.abs(np.asarray(got.logprob) - chosen) < tolerance).all()
    assert got.rank.tolist() == ((exact > chosen[:, None]).sum(axis=1) + 1).tolist()
    count = min(MAX_LOGPROBS, size)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :count]
    assert got.top_ids.tolist() == order.tolist()
    best = np.take_along_axis(exact, order, axis=1)
    assert (np.abs(np.asarray(got.top_logprobs) - best) < tolerance[:, None]).all()


def test_reported_log_probabilities_are_those_before_masks_penalties_and_temperature():
    logits = spread(SMALL, 9)
    params = SamplingParams(
        temperature=0.2, allowed_token_ids=[4, 5], logit_bias={4: 9.0}, repetition_penalty=3.0, top_k=1
    )
    tokens, got, _ = draw(logits, [Row(params, PROMPT, OUTPUT)], Variant.FULL)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert tokens.tolist() == [4]
    np.testing.assert_allclose(got.logprob[:1], [exact[4]], atol=1e-5)
    assert got.rank[:1].tolist() == [int((logits > logits[4]).sum()) + 1]
    assert got.top_ids[0].tolist() == np.argsort(-logits)[:MAX_LOGPROBS].tolist()


# ---------------------------------------------------------------------------------------------
# What cannot be sampled


@pytest.mark.parametrize("variant", [Variant.GREEDY, Variant.SAMPLED, Variant.FULL])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_told_and_neighbours_untouched(variant, bad):
    clean = np.stack([spread(SMALL, s) for s in range(6)])
    params = [SamplingParams(temperature=t, top_p=p) for t, p in ((0, 1), (1, 1), (5, 0.99)) for _ in (0, 1)]
    rows = [Row(p, seed=4, position=i) for i, p in enumerate(params)]
    expected, _, _ = draw(clean, rows, variant)
    dirty = clean.copy()
    dirty[0, 99] = dirty[2, 50] = dirty[4, 0] = bad
    got, logprobs, state = draw(dirty, rows, variant)
    assert got[[0, 2, 4]].tolist() == [NON_FINITE] * 3
    assert got[[1, 3, 5]].tolist() == expected[[1, 3, 5]].tolist()
    assert all(0 <= token < SMALL for token in state.last_token.tolist())
    if logprobs is not None:
        assert np.isfinite(np.asarray(logprobs.logprob)[[1, 3, 5]]).all()
    all_bad, _, _ = draw(np.full((6, SMALL), bad, np.float32), rows, variant)
    assert all_bad.tolist() == [NON_FINITE] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_all_is_masked_is_told_and_neighbours_untouched(temperature):
    logits = spread(SMALL)
    free = SamplingParams(temperature=temperature, top_p=0.9)
    masked = dataclasses.replace(free, allowed_token_ids=[5], stop_token_ids=[5])
    filtered = dataclasses.replace(masked, top_k=70, top_p=0.5, min_p=0.1)
    rows = [Row(free, seed=1), Row(masked, hold_stop=True), Row(free, seed=2), Row(filtered, hold_stop=True)]
    got, _, _ = draw(logits, rows, Variant.FULL)
    alone = [draw(logits, [row], Variant.FULL)[0][0] for row in (rows[0], rows[2])]
    assert got.tolist() == [alone[0], NO_CANDIDATE, alone[1], NO_CANDIDATE]


def test_padding_in_the_dump_row_is_sampled_without_trouble():
    """Padding repeats the dump row; its tokens are dropped, and its counters may wrap."""
    row_of, state, batch = make_batch([], SMALL, 8)
    assert row_of.tolist() == [8] * 8
    state.output_counts[8] = np.iinfo(np.int16).max
    for _ in range(3):
        tokens, _, state = run(np.zeros((8, SMALL), np.float32), row_of, state, batch, variant=Variant.FULL)
    assert tokens.tolist() == [0] * 8
    assert np.asarray(state.output_counts)[:8].sum() == 0


def test_one_pass_over_the_logits_finds_what_several_find():
    logits = np.random.default_rng(0).standard_normal((7, 3000)).astype(np.float32)
    logits[1, [40, 700, 2999]] = 9  # the first of equals
    logits[2] = -np.inf
    logits[3, ::2] = -np.inf
    logits[4, 17] = np.inf
    logits[5, 2999], logits[6] = np.nan, np.nan
    several, once = (jax.jit(find)(logits) for find in (sampling._survey, sampling._survey_at_once))
    for found, found_at_once in zip(several, once, strict=True):
        np.testing.assert_array_equal(found[:5], found_at_once[:5])
    for tokens in (several[1], once[1]):
        assert (0 <= np.asarray(tokens)).all() and (np.asarray(tokens) < 3000).all()
    np.testing.assert_array_equal(once[2], several[2])
    assert once[2].tolist() == [True, True, False, False, False, False, False]
