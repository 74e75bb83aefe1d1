"""From logits to tokens, on the device. `SamplingParams` documents the order of the steps.

The vocabulary is never sorted: a filter is a threshold, found among the most probable
`NUM_CANDIDATES` tokens or, where those do not suffice, by bisection. A drawn row costs one uniform
number: it inverts the cumulative distribution, in two levels.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.batch import (
    FLAG_ALLOWED,
    FLAG_EXTRAS,
    FLAG_HOLD_STOP,
    FLAG_PENALTIES,
    NO_CANDIDATE,
    NON_FINITE,
    Logprobs,
    RowState,
    SamplingBatch,
)
from jpaged.sampling_params import MAX_LOGPROBS

NUM_CANDIDATES = 64
_SEARCH_BLOCK = 256  # entries per block of the two-level search


class Variant(enum.IntEnum):
    """What a compiled step can do; each includes the ones before it."""

    GREEDY = 0
    SAMPLED = 1  # temperature, min_p, top_k, top_p
    FULL = 2  # masks, bias, penalties, log-probabilities of the sampled token
    PROMPT = 3  # log-probabilities of prompt tokens (prefill steps only)


def sample(
    logits: jax.Array, rows: jax.Array, state: RowState, batch: SamplingBatch, variant: Variant
) -> tuple[jax.Array, Logprobs | None, RowState]:
    """Chooses one token per sequence and notes it in the row state.

    Args:
      logits: float32 [S, V].
      rows: int32 [S], the dump row for those whose token nobody wants.

    Returns:
      int32 [S] tokens (or NON_FINITE, NO_CANDIDATE), their log-probabilities in variants from
      FULL on, and the new row state.
    """
    raw = logits
    if variant >= Variant.FULL:
        logits = _apply_masks_and_bias(logits, rows, state, batch)
        logits = _apply_penalties(logits, rows, state, batch)
    if variant == Variant.GREEDY:
        top, tokens, is_finite = lax.platform_dependent(logits, cuda=_survey_at_once, default=_survey)
    else:
        top, tokens, _ = _survey(logits)
        is_finite = _all_finite(raw)
    if variant >= Variant.SAMPLED:
        drawn = _draw(logits, top, batch)
        tokens = jnp.where(batch.temperature > 0, drawn, tokens)
    logprobs = token_logprobs(raw, tokens) if variant >= Variant.FULL else None
    state = _note(tokens, rows, state, batch, variant)
    tokens = jnp.where(top == -jnp.inf, NO_CANDIDATE, tokens)
    tokens = jnp.where(is_finite, tokens, NON_FINITE)
    return tokens, logprobs, state


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Log-probabilities under softmax(logits): float32 [X, V], int32 [X]."""
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # [X, 1]
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)  # [X, 1]
    top, top_ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(
        logprob=(chosen - norm)[:, 0],
        rank=jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1,
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top - norm,
    )


def _all_finite(logits: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.sum(logits, axis=-1))


def _survey(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row its maximum, the first index that holds it, and whether all of it is finite.

    Plain reductions one after the other beat an argmax on a CPU.
    """
    top = jnp.max(logits, axis=-1)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    size = logits.shape[-1]
    first = jnp.min(jnp.where(logits == top[:, None], index, size), axis=-1)
    return top, jnp.minimum(first, size - 1), _all_finite(logits)  # a row of NaN has no such index


def _survey_at_once(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_survey` that reads the logits once, as a GPU should; of a row with NaN the maximum ignores it.

    Read more often, XLA may even compute them more often, to save memory beside a large pool.
    """
    size = logits.shape[-1]

    def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
        return jnp.where(is_b, b[0], a[0]), jnp.where(is_b, b[1], a[1]), a[2] + b[2]

    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    start = (jnp.float32(-jnp.inf), jnp.int32(size), jnp.float32(0))
    top, first, total = lax.reduce((logits, index, logits), start, join, (1,))
    return top, jnp.minimum(first, size - 1), jnp.isfinite(total)


# ---------------------------------------------------------------------------------------------
# Masks, bias and penalties


def _has(batch: SamplingBatch, flag: int) -> jax.Array:
    return (batch.flags & flag) != 0  # [S]


def _unpack_bits(bits: jax.Array, size: int) -> jax.Array:
    """uint8 [S, ceil(V / 8)], lowest bit first -> bool [S, V]."""
    spread = (bits[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)[None, None, :]) & 1
    return spread.reshape(bits.shape[0], -1)[:, :size] != 0


def _put(logits: jax.Array, ids: jax.Array, value: float) -> jax.Array:
    """Sets logits [S, V] at ids [S, X]; an id of V or more sets nothing."""
    line = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[line, ids].set(value, mode="drop")


def _apply_masks_and_bias(
    logits: jax.Array, rows: jax.Array, state: RowState, batch: SamplingBatch
) -> jax.Array:
    size = logits.shape[-1]
    allowed = _unpack_bits(state.allowed[rows], size) | ~_has(batch, FLAG_ALLOWED)[:, None]
    logits = jnp.where(allowed, logits, -jnp.inf)

    extras = _has(batch, FLAG_EXTRAS)[:, None]
    line = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    bias_ids = jnp.where(extras, state.bias_ids[rows], size)
    logits = logits.at[line, bias_ids].add(state.bias[rows], mode="drop")

    words = state.bad_words[rows]  # [S, W, X]
    prefix, last = words[:, :, :-1], words[:, :, -1]
    recent = state.recent[rows][:, None, :]  # [S, 1, X - 1]
    matched = jnp.all((prefix < 0) | (prefix == recent), axis=-1) & (last >= 0) & extras
    logits = _put(logits, jnp.where(matched, last, size), -jnp.inf)

    hold = _has(batch, FLAG_HOLD_STOP)[:, None]
    return _put(logits, jnp.where(hold, state.stop_ids[rows], size), -jnp.inf)


def _apply_penalties(logits: jax.Array, rows: jax.Array, state: RowState, batch: SamplingBatch) -> jax.Array:
    counts = state.output_counts[rows].astype(jnp.float32)  # [S, V]
    seen = (counts > 0) | _unpack_bits(state.in_prompt[rows], logits.shape[-1])
    repetition = batch.repetition_penalty[:, None]
    penalized = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    penalized -= batch.frequency_penalty[:, None] * counts
    penalized -= batch.presence_penalty[:, None] * (counts > 0)
    return jnp.where(_has(batch, FLAG_PENALTIES)[:, None], penalized, logits)


def _note(
    tokens: jax.Array, rows: jax.Array, state: RowState, batch: SamplingBatch, variant: Variant
) -> RowState:
    state = dataclasses.replace(state, last_token=state.last_token.at[rows].set(tokens))
    if variant < Variant.FULL:
        return state
    dump = state.last_token.shape[0] - 1
    counted = jnp.where(_has(batch, FLAG_PENALTIES), rows, dump)
    recent = jnp.concatenate([state.recent[rows][:, 1:], tokens[:, None]], axis=1)
    return dataclasses.replace(
        state,
        output_counts=state.output_counts.at[counted, tokens].add(1),
        recent=state.recent.at[rows].set(recent),
    )


# ---------------------------------------------------------------------------------------------
# Filters and the draw


def _draw(logits: jax.Array, top: jax.Array, batch: SamplingBatch) -> jax.Array:
    """One token per row from the filtered distribution; rows of temperature 0 give anything."""
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1)
    # Relative to the top: the scaled top is exactly 0, however small the temperature.
    scaled = (logits - jnp.where(top == -jnp.inf, 0, top)[:, None]) / temperature[:, None]
    cut = jnp.log(batch.min_p)  # -inf where it is off
    candidates = lax.top_k(scaled, min(NUM_CANDIDATES, scaled.shape[-1]))[0]  # [S, C], descending
    cut = jnp.maximum(cut, _top_k_cut(scaled, candidates, batch.top_k))
    cut = jnp.maximum(cut, _top_p_cut(scaled, candidates, cut, batch.top_p))
    weights = jnp.where(scaled >= cut[:, None], jnp.exp(scaled), 0)
    return _invert(weights, _uniform(batch))


def _top_k_cut(scaled: jax.Array, candidates: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest value of each row, -inf where k is V or more."""
    count, size = candidates.shape[-1], scaled.shape[-1]
    near = jnp.take_along_axis(candidates, jnp.clip(top_k - 1, 0, count - 1)[:, None], axis=-1)[:, 0]
    is_off, is_near = top_k >= size, top_k <= count

    def search() -> jax.Array:
        return _bisect(lambda cut: jnp.sum(scaled >= cut[:, None], axis=-1) >= top_k, top_k.shape)

    far = lax.cond(jnp.all(is_off | is_near), lambda: near, search)
    return jnp.where(is_off, -jnp.inf, jnp.where(is_near, near, far))


def _top_p_cut(scaled: jax.Array, candidates: jax.Array, cut: jax.Array, top_p: jax.Array) -> jax.Array:
    """The largest value such that what is at or above it holds `top_p` of what `cut` left."""

    def mass(values: jax.Array, lowest: jax.Array) -> jax.Array:
        return jnp.where(values >= lowest[:, None], jnp.exp(values), 0)

    wanted = top_p * jnp.sum(mass(scaled, cut), axis=-1)  # [S]
    reached = jnp.cumsum(mass(candidates, cut), axis=-1) >= wanted[:, None]  # [S, C]
    is_off, is_near = top_p >= 1, reached[:, -1]
    first = jnp.sum(~reached, axis=-1)
    near = jnp.take_along_axis(candidates, jnp.minimum(first, candidates.shape[-1] - 1)[:, None], axis=-1)[
        :, 0
    ]

    def search() -> jax.Array:
        def holds(lowest: jax.Array) -> jax.Array:
            return jnp.sum(mass(scaled, jnp.maximum(lowest, cut)), axis=-1) >= wanted

        return _bisect(holds, top_p.shape)

    far = lax.cond(jnp.all(is_off | is_near), lambda: near, search)
    return jnp.where(is_off, -jnp.inf, jnp.where(is_near, near, far))


def _bisect(holds, shape: tuple[int, ...]) -> jax.Array:  # noqa: ANN001
    """The largest float32 at most 0 per row for which `holds`, which is true from some value down.

    Negative floats are ordered like their bits, in reverse: 31 halvings find the exact value.
    """

    def as_float(bits: jax.Array) -> jax.Array:
        return -lax.bitcast_convert_type(bits, jnp.float32)

    def step(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # `holds` at high; the answer lies in [low, high]
        middle = low + (high - low) // 2
        good = holds(as_float(middle))
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    infinity = jnp.int32(0x7F800000)
    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, infinity))
    return as_float(lax.fori_loop(0, 31, step, bounds)[1])


def _uniform(batch: SamplingBatch) -> jax.Array:
    """One number in [0, 1) per row, from the request's seed, its choice and the position alone."""

    def one(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(batch.seed, batch.choice, batch.position)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index at which the running sum of a row's weights passes `uniform` times their total.

    Sums are float32, so tokens of a probability below about 1e-7 are drawn only roughly as often
    as they should be.
    """
    num_rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _SEARCH_BLOCK))).reshape(num_rows, -1, _SEARCH_BLOCK)
    block_sum = jnp.sum(blocks, axis=-1)  # [S, V / 256]
    running = jnp.cumsum(block_sum, axis=-1)
    target = uniform * running[:, -1]  # [S]
    block = _first_above(running, block_sum, target)
    before = jnp.take_along_axis(running - block_sum, block[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, 256]
    index = _first_above(jnp.cumsum(inside, axis=-1), inside, target - before)
    return jnp.minimum(block * _SEARCH_BLOCK + index, size - 1)


def _first_above(running: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """First index with a positive weight whose running sum is above target; else the last positive."""
    index = lax.broadcasted_iota(jnp.int32, running.shape, 1)
    positive = weights > 0
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    found = positive & (running > target[:, None])
    return jnp.min(jnp.where(found, index, last[:, None]), axis=-1)
