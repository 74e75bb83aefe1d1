"""Sampling through the engine: what a request draws depends on nothing that runs beside it.

The reference for logits is one dense pass over prompt and output, in float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.models.transformer import forward, logits
from jpaged.ops.attention import split_qkv
from jpaged.request import RequestOutput
from jpaged.sampling_params import SamplingParams

MAX_MODEL_LEN = 160


def engine_of(config, params, **options) -> Engine:
    """One ragged bucket, and the sizes of test_exactness otherwise: so little is compiled."""
    sizes = dict(max_model_len=MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=32, num_kv_blocks=128)
    return Engine(config, params, **(sizes | options))


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 301, length).tolist()


PROMPT = prompt_of(40, 100)
NEIGHBOURS = [prompt_of(n, n) for n in (1, 17, 5, 33, 2, 64, 16)]


Requests = list[tuple[list[int], SamplingParams]]


def run(engine: Engine, requests: Requests, *, each=None) -> list[RequestOutput]:
    """Runs requests together; returns their last outputs. `each` sees every output that comes."""
    names = [engine.add_request(prompt, params, stream=each is not None) for prompt, params in requests]
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output
            if each is not None:
                each(output)
        engine.scheduler.check_invariants()
    assert engine.scheduler.kv.num_active == 0
    return [done[name] for name in names]


def ids(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def chunked(engine: Engine, tokens: int) -> Engine:
    """The same engine with smaller steps, which fit the same buckets."""
    engine.scheduler.max_num_batched_tokens = tokens
    return engine


def preempting(engine: Engine, due) -> tuple[Engine, list[str]]:
    """The same engine; a running request is preempted once, when `due(request)`. And who was."""
    preempted: list[str] = []
    schedule = engine.scheduler.schedule

    def wrapped():
        for request in list(engine.scheduler.running):
            if due(request) and request.request_id not in preempted:
                preempted.append(request.request_id)
                engine.scheduler.preempt(request)
        return schedule()

    engine.scheduler.schedule = wrapped
    return engine, preempted


@pytest.fixture(scope="module")
def engine(config, params) -> Engine:
    return engine_of(config, params)


@pytest.fixture(scope="module")
def dense(config, params):
    """Logits float64 [tokens, V] of a whole sequence: plain causal attention, no cache."""
    distance = np.arange(MAX_MODEL_LEN)[:, None] - np.arange(MAX_MODEL_LEN)[None, :]

    def attend(layer, qkv):
        q, *kv = split_qkv(qkv)
        k, v = (jnp.repeat(x, config.group_size, axis=1) for x in kv)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where((distance >= 0)[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")

    @jax.jit
    def whole(tokens):
        positions = jnp.arange(MAX_MODEL_LEN, dtype=jnp.int32)
        return logits(params, forward(params, config, tokens, positions, attend))

    def of(token_ids: list[int]) -> np.ndarray:
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(whole(padded), np.float64)[: len(token_ids)]

    return of


# ---------------------------------------------------------------------------------------------
# Seeds

SEEDED = SamplingParams(seed=42, temperature=0.8, max_tokens=20, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=12, top_p=0.95)


@pytest.fixture(scope="module")
def alone(config, params) -> list[int]:
    engine = engine_of(config, params, overlap=False)
    return ids(run(engine, [(PROMPT, SEEDED)])[0])


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_seeded_request_draws_the_same_beside_unseeded_ones(engine, alone, place):
    requests = [(prompt, UNSEEDED) for prompt in NEIGHBOURS]
    requests.insert(place, (PROMPT, SEEDED))
    assert ids(run(engine, requests)[place]) == alone


def test_a_seeded_request_draws_the_same_in_chunks(config, params, alone):
    engine = chunked(engine_of(config, params), 16)
    requests = [*((prompt, UNSEEDED) for prompt in NEIGHBOURS), (PROMPT, SEEDED)]
    assert ids(run(engine, requests)[-1]) == alone


@pytest.mark.parametrize("overlap", [True, False])
def test_a_seeded_request_draws_the_same_after_preemption(config, params, alone, overlap):
    engine, preempted = preempting(
        engine_of(config, params, overlap=overlap), lambda request: request.num_output_tokens >= 7
    )
    requests = [(NEIGHBOURS[0], UNSEEDED), (PROMPT, SEEDED), (NEIGHBOURS[1], UNSEEDED)]
    assert ids(run(engine, requests)[1]) == alone
    assert len(preempted) == 3


def test_another_seed_draws_otherwise(engine, alone):
    others = [dataclasses.replace(SEEDED, seed=seed) for seed in (0, 43, 42 + 2**32)]
    outputs = [ids(output) for output in run(engine, [(PROMPT, params) for params in others])]
    assert len({tuple(output) for output in [*outputs, alone]}) == 4


def test_unseeded_requests_differ_from_each_other_and_between_calls(engine):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = [ids(output) for _ in range(2) for output in run(engine, [(PROMPT, params)] * 4)]
    assert len({tuple(output) for output in outputs}) == 8


def test_unseeded_requests_are_reproduced_by_an_engine_of_the_same_seed(config, params):
    requests = [(prompt, UNSEEDED) for prompt in NEIGHBOURS]
    first, second, third = (
        [ids(output) for output in run(engine_of(config, params, seed=seed), requests)] for seed in (5, 5, 6)
    )
    assert first == second
    assert all(one != other for one, other in zip(first[1:], third[1:], strict=True))


# ---------------------------------------------------------------------------------------------
# Several completions

SEVERAL = SamplingParams(n=4, seed=7, max_tokens=30, stop_token_ids=range(3, 36), ignore_eos=True)


def completions(output: RequestOutput) -> list[tuple]:
    return [(o.index, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]


def test_completions_come_in_order_differ_and_are_reproducible(engine):
    seen = []
    (first,) = run(engine, [(PROMPT, SEVERAL)], each=lambda output: seen.append(completions(output)))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert all([index for index, *_ in each] == [0, 1, 2, 3] for each in seen)
    lengths = [len(o.token_ids) for o in first.outputs]
    assert len(set(lengths)) > 1, "no two stop at different times; choose other stop ids"
    assert len({tuple(o.token_ids) for o in first.outputs}) == 4
    for o in first.outputs:
        assert (o.finish_reason, o.stop_reason) == ("stop", o.token_ids[-1])
        assert not set(o.token_ids[:-1]) & set(SEVERAL.stop_token_ids)
    neighbours = [(prompt, UNSEEDED) for prompt in NEIGHBOURS[:3]]
    again = run(engine, [*neighbours, (PROMPT, SEVERAL)])[-1]
    assert completions(again) == completions(first)


def test_the_first_of_several_is_what_a_single_completion_is(engine):
    several, single = run(engine, [(PROMPT, SEVERAL), (PROMPT, dataclasses.replace(SEVERAL, n=1))])
    assert completions(single) == completions(several)[:1]


def test_completions_survive_preemption(config, params, engine):
    (expected,) = run(engine, [(PROMPT, SEVERAL)])
    other, preempted = preempting(engine_of(config, params), lambda request: request.num_output_tokens >= 2)
    (got,) = run(other, [(PROMPT, SEVERAL)])
    assert completions(got) == completions(expected)
    assert len(preempted) >= 3 and got.metrics.num_preemptions == len(preempted)


def test_greedy_completions_are_all_equal(engine):
    params = SamplingParams(n=4, temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = run(engine, [(PROMPT, params)])
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert [o.token_ids for o in output.outputs] == [output.outputs[0].token_ids] * 4
    assert len(output.outputs[0].token_ids) == 8


# ---------------------------------------------------------------------------------------------
# Where a request ends

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LAST = 300  # the last id of the vocabulary


def test_stop_ids_outside_the_vocabulary_are_refused_for_that_request_alone(engine):
    (expected,) = run(engine, [(PROMPT, GREEDY)])
    name = engine.add_request(PROMPT, GREEDY)
    for wrong in (301, 306, 2**31):
        params = SamplingParams(temperature=0, stop_token_ids=[5, wrong], min_tokens=4)
        with pytest.raises(ValueError, match=rf"stop_token_ids.*{wrong}.*\[0, 301\)"):
            engine.add_request(PROMPT, params)
    with pytest.raises(ValueError, match=r"stop_token_ids=-1 must be at least 0"):
        SamplingParams(stop_token_ids=[-1])
    assert engine.num_unfinished == 1
    done = {}
    while engine.has_unfinished():
        done.update((output.request_id, output) for output in engine.step())
    assert list(done) == [name] and ids(done[name]) == ids(expected)


def test_unused_places_for_stop_ids_mask_no_token(engine):
    """They hold the vocabulary's size; clamped, they would mask its last id."""
    params = SamplingParams(
        temperature=0, max_tokens=8, min_tokens=8, stop_token_ids=[5], logit_bias={LAST: 100.0}
    )
    (output,) = run(engine, [(PROMPT, params)])
    assert ids(output) == [LAST] * 8


@pytest.mark.parametrize("stop", [LAST, 50, 2])
def test_stop_ids_do_not_come_before_min_tokens(config, params, engine, stop):
    """The stop id is as good as certain wherever it is not masked; 2 is the model's end of sequence."""
    wish = SamplingParams(
        temperature=0, max_tokens=20, stop_token_ids=[] if stop == 2 else [stop], logit_bias={stop: 100.0}
    )
    reason = None if stop == 2 else stop
    (at_once, later) = run(engine, [(PROMPT, wish), (PROMPT, dataclasses.replace(wish, min_tokens=10))])
    assert completions(at_once) == [(0, [stop], "stop", reason)]
    assert len(ids(later)) == 11 and ids(later)[10] == stop and stop not in ids(later)[:10]
    assert (later.outputs[0].finish_reason, later.outputs[0].stop_reason) == ("stop", reason)
    other, preempted = preempting(engine_of(config, params), lambda request: request.num_output_tokens >= 4)
    (again,) = run(chunked(other, 16), [(PROMPT, dataclasses.replace(wish, min_tokens=10))])
    assert completions(again) == completions(later) and preempted


class Characters:
    """A tokenizer of one character per id."""

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(256 + token) for token in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 256 for char in text if ord(char) >= 256]


@pytest.fixture(scope="module")
def texts(config, params) -> Engine:
    return engine_of(config, params, tokenizer=Characters())


X = chr(256 + 50)
ONLY_X = dict(temperature=0, max_tokens=20, logit_bias={50: 100.0})


@pytest.mark.parametrize(
    ("options", "length", "text"),
    [
        (dict(stop=X), 1, ""),
        (dict(stop=X, min_tokens=10), 11, X * 10),
        (dict(stop=X * 2, min_tokens=10), 12, X * 10),  # must begin after the first ten
        (dict(stop=X, min_tokens=10, include_stop_str_in_output=True), 11, X * 11),
        (dict(stop=X, min_tokens=20), 20, X * 20),
    ],
    ids=str,
)
def test_stop_strings_do_not_count_before_min_tokens(texts, options, length, text):
    (output,) = run(texts, [(PROMPT, SamplingParams(**ONLY_X, **options))])
    assert ids(output) == [50] * length
    assert output.outputs[0].text == text
    ends = ("length", None) if length == 20 else ("stop", options["stop"])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ends


def test_bad_words_are_never_completed(texts):
    (free,) = run(texts, [(PROMPT, GREEDY)])
    tokens = ids(free)
    pair, single = texts.tokenizer.decode(tokens[4:6]), texts.tokenizer.decode(tokens[:1])
    first, second = run(
        texts,
        [
            (PROMPT, dataclasses.replace(GREEDY, bad_words=[pair])),
            (PROMPT, dataclasses.replace(GREEDY, bad_words=[single])),
        ],
    )
    assert ids(first)[:5] == tokens[:5] and ids(first)[5] != tokens[5]
    assert pair not in first.outputs[0].text
    assert tokens[0] not in ids(second)


def test_a_bad_word_is_not_completed_across_a_preemption(config, params, texts):
    (free,) = run(texts, [(PROMPT, GREEDY)])
    word = texts.tokenizer.decode(ids(free)[2:6])
    wanted = dataclasses.replace(GREEDY, bad_words=[word])
    other, preempted = preempting(
        engine_of(config, params, tokenizer=Characters(), overlap=False),
        lambda request: request.num_output_tokens == 5,
    )
    outputs = run(other, [(PROMPT, wanted)])
    assert len(preempted) == 1 and ids(outputs[0])[:5] == ids(free)[:5]
    assert ids(outputs[0]) == ids(run(texts, [(PROMPT, wanted)])[0]) != ids(free)


@pytest.mark.parametrize("max_tokens", [0, 1, None, 10**9])
def test_max_tokens_is_exact_and_leaves_neighbours_alone(engine, max_tokens):
    neighbours = [(NEIGHBOURS[1], GREEDY), (NEIGHBOURS[3], GREEDY)]
    expected = [ids(output) for output in run(engine, neighbours)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    one, middle, other = run(engine, [neighbours[0], (PROMPT, params), neighbours[1]])
    assert [ids(one), ids(other)] == expected
    count = max_tokens if max_tokens in (0, 1) else MAX_MODEL_LEN - len(PROMPT)
    assert len(ids(middle)) == count
    assert middle.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [-1, True, 1.5, "5"])
def test_wrong_max_tokens_are_refused_where_they_are_made(max_tokens):
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


def test_a_prompt_may_fill_the_context_but_for_what_it_asks_for(engine, dense):
    whole = prompt_of(MAX_MODEL_LEN, 11)
    for max_tokens in (1, 2, None):
        params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
        (output,) = run(engine, [(whole[:-1], params)])
        assert len(ids(output)) == 1 and output.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match="has 160 tokens, at most 159 fit"):
            engine.add_request(whole, params)
    (scored,) = run(engine, [(whole, dataclasses.replace(SCORED, max_tokens=0, logprobs=None))])
    exact = log_softmax(dense(whole))
    assert ids(scored) == [] and len(scored.prompt_logprobs) == MAX_MODEL_LEN
    last = scored.prompt_logprobs[-1][whole[-1]]
    assert last.logprob == pytest.approx(exact[-2][whole[-1]], abs=1e-4)
    with pytest.raises(ValueError, match="has 161 tokens, at most 160 fit"):
        engine.add_request([*whole, 5], dataclasses.replace(GREEDY, max_tokens=0))


def test_ids_that_padding_or_the_end_uses_are_ordinary_in_a_prompt(engine, dense):
    """0 fills up batches, 2 is the end of a sequence."""
    prompts = [[0], [2], [0, 0], [5, 0, 2, 0, 6], [0] * 17, [2, 0] * 32, [7, *[2] * 30, 8], [0] * 64]
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[0])
    together = run(engine, [(prompt, params) for prompt in prompts])
    for prompt, output in zip(prompts, together, strict=True):
        (single,) = run(engine, [(prompt, params)])
        assert completions(single) == completions(output)
        best = dense(prompt + ids(output)).argmax(axis=1)[len(prompt) - 1 :]
        assert ids(output) == best[: len(ids(output))].tolist()


def test_limits_beyond_the_vocabulary_are_no_limits(engine):
    base = SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    limits = (0, -1, 301, 302, 10**7, 1)
    requests = [(PROMPT, dataclasses.replace(base, top_k=top_k)) for top_k in limits]
    outputs = [ids(output) for output in run(engine, requests)]
    assert outputs[:5] == [outputs[0]] * 5
    assert outputs[5] == ids(run(engine, [(PROMPT, dataclasses.replace(GREEDY, max_tokens=10))])[0])


# ---------------------------------------------------------------------------------------------
# Penalties


def penalized(values: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    counts = np.bincount(np.array(output, int), minlength=len(values))
    seen = np.isin(np.arange(len(values)), prompt + output)
    repetition = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = np.where(seen, repetition, values)
    return values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


PENALTIES = [
    dict(repetition_penalty=1.5),
    dict(repetition_penalty=0.7),
    dict(presence_penalty=1.2),
    dict(presence_penalty=-1.2),
    dict(frequency_penalty=0.8),
    dict(frequency_penalty=-0.3),
    dict(repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2),
]
REPETITIVE = [7, 8, 9, 7, 8, 9, 7, 8, 9, 50, 50, 50]


@pytest.fixture(scope="module")
def greedy_with_penalties(engine) -> list[list[int]]:
    requests = [(REPETITIVE, dataclasses.replace(GREEDY, max_tokens=40, **p)) for p in ({}, *PENALTIES)]
    return [ids(output) for output in run(engine, requests)]


@pytest.mark.parametrize("index", range(len(PENALTIES)), ids=map(str, PENALTIES))
def test_penalties_are_those_of_a_replay(dense, greedy_with_penalties, index):
    plain, got = greedy_with_penalties[0], greedy_with_penalties[1 + index]
    assert got != plain
    replay_chooses(dense, got, SamplingParams(**PENALTIES[index]))


def test_penalties_are_the_same_after_preemption(config, params, greedy_with_penalties):
    other, preempted = preempting(engine_of(config, params), lambda request: request.num_output_tokens >= 9)
    requests = [(REPETITIVE, dataclasses.replace(GREEDY, max_tokens=40, **p)) for p in PENALTIES]
    assert [ids(output) for output in run(other, requests)] == greedy_with_penalties[1:]
    assert len(preempted) == len(PENALTIES)


def replay_chooses(dense, output: list[int], params: SamplingParams) -> None:
    """Each token is the best of its penalized logits, up to rounding."""
    values = dense(REPETITIVE + output)[len(REPETITIVE) - 1 :]
    for step, token in enumerate(output):
        row = penalized(values[step], params, REPETITIVE, output[:step])
        assert row[token] >= row.max() - 1e-4, f"output token {step}"


def test_the_replay_tells_penalties_apart(dense, greedy_with_penalties):
    for index, params in enumerate(PENALTIES):
        with pytest.raises(AssertionError):
            replay_chooses(dense, greedy_with_penalties[0], SamplingParams(**params))
        with pytest.raises(AssertionError):
            replay_chooses(dense, greedy_with_penalties[1 + index], SamplingParams())


# ---------------------------------------------------------------------------------------------
# Log-probabilities

SCORED = dataclasses.replace(GREEDY, max_tokens=10, logprobs=20, prompt_logprobs=5)
LONG = prompt_of(70, 7)


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def check_logprobs(output: RequestOutput, prompt: list[int], dense) -> None:
    """Every reported value is that of the dense pass."""
    tokens = ids(output)
    exact = log_softmax(dense(prompt + tokens))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(output.outputs[0].logprobs) == len(tokens)
    chosen = 0.0
    for position, entries in enumerate([*output.prompt_logprobs[1:], *output.outputs[0].logprobs], start=1):
        own, count = exact[position - 1], 5 if position < len(prompt) else 20
        token = (prompt + tokens)[position]
        order = np.argsort(-own, kind="stable")
        rank = {int(t): r for r, t in enumerate(order, start=1)}
        assert set(entries) == {token, *order[:count].tolist()}, f"position {position}"
        for token_id, value in entries.items():
            assert value.rank == rank[token_id]
            assert abs(value.logprob - own[token_id]) < 1e-4
        chosen += own[token] if position >= len(prompt) else 0.0
    assert output.outputs[0].cumulative_logprob == pytest.approx(chosen, abs=1e-3)


def test_log_probabilities_of_whole_prompts(engine, dense):
    for prompt in (LONG[:32], LONG[:1], LONG[:2], LONG[:17]):
        (output,) = run(engine, [(prompt, SCORED)])
        check_logprobs(output, prompt, dense)


def test_log_probabilities_of_prompts_together(engine, dense):
    requests = [(prompt, SCORED) for prompt in (PROMPT, LONG[:1], LONG[:2], NEIGHBOURS[3], LONG[:50])]
    for output, (prompt, _) in zip(run(engine, requests), requests, strict=True):
        check_logprobs(output, prompt, dense)


def test_log_probabilities_of_prompts_in_chunks(config, params, dense):
    for tokens in (8, 16, 21):
        engine = chunked(engine_of(config, params), tokens)
        prompts = [LONG, PROMPT, LONG[:33]]
        for output, prompt in zip(run(engine, [(p, SCORED) for p in prompts]), prompts, strict=True):
            check_logprobs(output, prompt, dense)


def test_log_probabilities_of_a_prompt_that_is_cached(engine, dense):
    cold = run(engine, [(LONG[:65], dataclasses.replace(SCORED, prompt_logprobs=None))])[0]
    warm, again = (run(engine, [(LONG[:65], SCORED)])[0] for _ in range(2))
    for output in (warm, again):
        assert ids(output) == ids(cold)
        check_logprobs(output, LONG[:65], dense)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", ["in the prompt", "in the output"])
def test_log_probabilities_after_preemption(config, params, dense, when, overlap):
    def due(request) -> bool:
        if when == "in the prompt":
            return 16 < request.num_scheduled < request.num_prompt_tokens
        return request.num_output_tokens >= 3

    engine, preempted = preempting(engine_of(config, params, overlap=overlap), due)
    prompts = [LONG, PROMPT]
    outputs = run(chunked(engine, 16), [(prompt, SCORED) for prompt in prompts])
    for output, prompt in zip(outputs, prompts, strict=True):
        check_logprobs(output, prompt, dense)
    assert len(preempted) == 2


def test_log_probabilities_can_be_asked_for_the_token_alone(engine):
    params = dataclasses.replace(GREEDY, max_tokens=3, logprobs=0, prompt_logprobs=0)
    (output,) = run(engine, [(PROMPT, params)])
    assert [list(entries) for entries in output.prompt_logprobs[1:]] == [[token] for token in PROMPT[1:]]
    assert [list(entries) for entries in output.outputs[0].logprobs] == [[token] for token in ids(output)]


def test_a_prompt_is_scored_without_generating_anything(engine, dense):
    (output,) = run(engine, [(PROMPT, dataclasses.replace(SCORED, max_tokens=0, logprobs=None))])
    assert (ids(output), output.outputs[0].logprobs) == ([], None)
    (scored,) = run(engine, [(PROMPT, SCORED)])
    assert [list(x) for x in output.prompt_logprobs[1:]] == [list(x) for x in scored.prompt_logprobs[1:]]
    with_logprobs = run(engine, [(PROMPT, dataclasses.replace(SCORED, max_tokens=0))])[0]
    assert (with_logprobs.outputs[0].logprobs, ids(with_logprobs)) == ([], [])


def test_each_completion_has_its_own_log_probabilities(engine, dense):
    params = dataclasses.replace(SCORED, n=3, temperature=1.0, seed=1, logprobs=2)
    (output,) = run(engine, [(PROMPT, params)])
    for completion in output.outputs:
        exact = log_softmax(dense(PROMPT + completion.token_ids)[len(PROMPT) - 1 :])
        for own, token, entries in zip(exact, completion.token_ids, completion.logprobs, strict=False):
            assert entries[token].logprob == pytest.approx(own[token], abs=1e-4)
            assert 2 <= len(entries) <= 3
    assert len(output.prompt_logprobs) == len(PROMPT)


# ---------------------------------------------------------------------------------------------
# What cannot be sampled


def failed(output: RequestOutput, words: str) -> bool:
    return output.error is not None and words in output.error and not output.outputs and output.finished


def test_a_prompt_that_makes_logits_nan_fails_alone(config, params, engine):
    """NaN in one row of the embedding: only who has that token sees it, and nobody who comes after."""
    sick = engine_of(config, dataclasses.replace(params, embed=params.embed.at[77].set(np.nan)))
    healthy = [prompt for prompt in NEIGHBOURS if 77 not in prompt]
    expected = [ids(output) for output in run(engine, [(prompt, GREEDY) for prompt in healthy])]
    assert all(77 not in output for output in expected) and len(healthy) > 3
    bad = [*PROMPT[:20], 77, *PROMPT[20:]]
    for _ in range(2):
        outputs = run(sick, [(bad, GREEDY), *((p, GREEDY) for p in healthy), (bad, UNSEEDED), (bad, SEVERAL)])
        assert [ids(output) for output in outputs[1:-2]] == expected
        assert all(failed(outputs[i], "not finite") for i in (0, -2, -1))


def test_logits_that_turn_nan_while_generating_are_told(config, params, engine):
    """The third token is poison as an input, so the fourth cannot be sampled."""
    (expected,) = run(engine, [(PROMPT, GREEDY)])
    token = ids(expected)[2]
    assert token not in PROMPT + ids(expected)[:2]
    sick = engine_of(config, dataclasses.replace(params, embed=params.embed.at[token].set(np.nan)))
    seen = []
    (output,) = run(sick, [(PROMPT, GREEDY)], each=seen.append)
    assert failed(output, "not finite")
    assert [ids(partial) for partial in seen[:-1]] == [ids(expected)[: n + 1] for n in range(3)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sick_weight_gives_errors_and_no_text(config, params, bad):
    layer = dataclasses.replace(params.layers[1], w_down=params.layers[1].w_down.at[3, 5].set(bad))
    sick = engine_of(config, dataclasses.replace(params, layers=(params.layers[0], layer)))
    outputs = run(sick, [(prompt, GREEDY) for prompt in NEIGHBOURS])
    assert all(failed(output, "not finite") for output in outputs)


def test_activations_beyond_float16_are_told_in_float16_and_served_in_float32(config):
    """Weights of which each fits in float16, and whose activations do not."""
    params = tiny_params(config)
    layers = tuple(
        dataclasses.replace(layer, w_gate_up=layer.w_gate_up * 1000, w_down=layer.w_down / 1000)
        for layer in params.layers
    )
    large = dataclasses.replace(params, layers=layers)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(large)) < 65504
    requests = [(prompt, GREEDY) for prompt in NEIGHBOURS[1:3]]
    assert all(len(ids(output)) == 20 for output in run(engine_of(config, large), requests))
    half = run(engine_of(config, large, dtype="float16"), requests)
    assert all(failed(output, "not finite") for output in half)


def test_a_request_in_which_all_is_masked_fails_alone(engine):
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=3, max_tokens=5)
    (expected,) = run(engine, [(PROMPT, GREEDY)])
    first, second = run(engine, [(NEIGHBOURS[2], impossible), (PROMPT, GREEDY)])
    assert failed(first, "mask")
    assert ids(second) == ids(expected)


def test_models_whose_dtype_is_float16_generate(config):
    """So that the float16 error above is the overflow's."""
    engine = engine_of(tiny_config(dtype="float16"), tiny_params(config, dtype="float16"))
    assert all(len(ids(output)) == 20 for output in run(engine, [(p, GREEDY) for p in NEIGHBOURS[1:3]]))
