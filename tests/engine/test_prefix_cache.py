"""A hit never changes an answer: float32 ids with every cache, bits with `deterministic`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from conftest import tiny_params

from jpaged.engine.engine import Engine
from jpaged.sampling_params import SamplingParams

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EXACT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 301, length).tolist()


def engine_of(config, params, **options) -> Engine:
    sizes = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=128)
    return Engine(config, params, **(sizes | options))


def run(engine: Engine, prompts, params=GREEDY, **options):
    names = [engine.add_request(prompt, params, stream=False, **options) for prompt in prompts]
    return finish(engine, names)


def finish(engine: Engine, names: list[str]):
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
    stats = engine.stats()
    assert stats["kv_blocks_active"] == 0
    assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]
    return [done[name] for name in names]


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def bits(outputs) -> list:
    return [
        (c.token_ids, [[(i, lp.logprob, lp.rank) for i, lp in step.items()] for step in c.logprobs])
        for output in outputs
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def plain(config, params):
    """One engine without a cache, one request at a time: the reference."""
    engine = engine_of(config, params, prefix_cache="off", max_num_seqs=1, max_num_batched_tokens=160)
    return lambda prompt, sampling=GREEDY: ids(run(engine, [prompt], sampling))[0]


@pytest.fixture(scope="module", params=["radix", "hash"])
def cached(request, config, params):
    """One engine with a cache, emptied before each use."""
    engine = engine_of(config, params, prefix_cache=request.param)

    def fresh() -> Engine:
        engine.reset_prefix_cache()
        engine.reset_stats()
        return engine

    return fresh


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 100])
def test_the_same_prompt_again_hits_all_but_its_last_token_and_answers_the_same(cached, plain, length):
    engine, prompt = cached(), ids_of(length)
    (cold,), (warm,) = run(engine, [prompt]), run(engine, [prompt])
    assert ids([cold]) == ids([warm]) == [plain(prompt)]
    assert cold.num_cached_tokens == 0
    # Generated tokens are cached, too: the block that the prompt ends in may be full by now.
    known = (length + 7) // BLOCK * BLOCK
    granularity = 1 if engine.options.prefix_cache == "radix" else BLOCK
    assert warm.num_cached_tokens == min(known, length - 1) // granularity * granularity


@pytest.mark.parametrize("shared", [0, 5, 16, 20, 47, 48, 63])
def test_a_prefix_of_any_length_is_reused_to_the_token(cached, plain, shared):
    engine = cached()
    first = ids_of(64)
    second = first[:shared] + [3 + (first[shared] - 2) % 298] + ids_of(20, 9)
    run(engine, [first])
    (output,) = run(engine, [second])
    granularity = 1 if engine.options.prefix_cache == "radix" else BLOCK
    assert output.num_cached_tokens == shared // granularity * granularity
    assert ids([output]) == [plain(second)]


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_hits_and_misses_in_one_batch_do_not_mix(cached, plain, order):
    engine, warm = cached(), ids_of(64)
    run(engine, [warm])
    prompts = [warm + ids_of(9, 1), ids_of(70, 2), warm[:40], warm[:30] + ids_of(9, 3)]
    prompts = [prompts[i] for i in order]
    assert ids(run(engine, prompts)) == [plain(prompt) for prompt in prompts]


def test_eight_identical_prompts_at_once_share_one_computation(cached, plain):
    engine, prompt = cached(), ids_of(100)
    assert ids(run(engine, [prompt] * 8)) == [plain(prompt)] * 8
    stats = engine.stats()
    computed = stats["prefix_cache_queries"] - stats["prefix_cache_hits"]
    assert computed == 100 + 7 * (100 - 96)  # the last block is not full, so it is not shared


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_aborting_the_one_that_computes_the_prefix_hurts_nobody(config, params, plain, when):
    engine = engine_of(config, params, max_num_batched_tokens=32)
    prompt = ids_of(100)
    names = [engine.add_request(prompt, GREEDY, stream=False) for _ in range(8)]
    for _ in range(when):
        engine.step()
    engine.abort(names[0])
    outputs = finish(engine, names)
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert ids(outputs[1:]) == [plain(prompt)] * 7


def test_blocks_that_were_evicted_are_not_found_again(config, params, plain):
    engine = engine_of(config, params, num_kv_blocks=12)
    prompt = ids_of(40)
    run(engine, [prompt])
    for seed in range(1, 8):
        run(engine, [ids_of(60, seed)])
    assert engine.stats()["prefix_cache_evictions"] > 0
    (again,) = run(engine, [prompt])
    assert again.num_cached_tokens == 0
    assert ids([again]) == [plain(prompt)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_a_pool_under_pressure_gives_the_same_ids_with_every_policy(config, params, plain, policy):
    engine = engine_of(config, params, num_kv_blocks=14, eviction_policy=policy)
    rng = np.random.default_rng(0)
    stems = [ids_of(40, seed) for seed in range(3)]
    prompts = [stems[rng.integers(3)][: rng.integers(1, 41)] + ids_of(10, int(s)) for s in range(24)]
    for _ in range(2):
        assert ids(run(engine, prompts)) == [plain(prompt) for prompt in prompts]
    stats = engine.stats()
    assert stats["num_preemptions"] > 0 and stats["prefix_cache_evictions"] > 0
    assert stats["prefix_cache_hits"] > 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs"])
def test_every_order_of_admission_gives_the_same_ids(config, params, plain, policy):
    engine = engine_of(config, params, max_num_seqs=2, schedule_policy=policy)
    prompts = [ids_of(30, seed % 3) + ids_of(6, seed) for seed in range(12)]
    assert ids(run(engine, prompts)) == [plain(prompt) for prompt in prompts]


def test_a_chat_of_six_turns_hits_what_was_said_before(cached, plain):
    engine, history = cached(), ids_of(10)
    for turn in range(6):
        (output,) = run(engine, [history])
        assert ids([output]) == [plain(history)]
        if engine.options.prefix_cache == "radix" and turn:
            # All but the new message and the last answer's last token, which was never computed.
            assert output.num_cached_tokens == (len(history) - 7) // BLOCK * BLOCK
        history = history + output.outputs[0].token_ids + ids_of(6, turn)


@pytest.mark.parametrize("kind", ["radix", "hash", "off"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", [1, 2, 5, 9])
def test_a_fork_goes_on_like_its_source(config, params, plain, kind, overlap, when):
    engine = engine_of(config, params, prefix_cache=kind, overlap=overlap)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = ids_of(21)
    name = engine.add_request(prompt, long, stream=False)
    for _ in range(when):
        engine.step()
    known = engine.scheduler.running[0].num_output_tokens
    branches = engine.fork(name, 3)
    outputs = finish(engine, [name, *branches])
    assert ids(outputs) == [plain(prompt, long)] * 4
    assert known < 30
    if known > 1:
        assert engine.stats()["prefix_cache_copies"] >= 3


def test_forks_of_a_seeded_request_share_the_past_and_draw_their_own_future(config, params):
    engine = engine_of(config, params)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    name = engine.add_request(ids_of(21), sampled, stream=False)
    for _ in range(8):
        engine.step()
    known = list(engine.scheduler.running[0].output_token_ids)
    outputs = ids(finish(engine, [name, *engine.fork(name, 2)]))
    assert known and all(output[: len(known)] == known for output in outputs)
    assert len({tuple(output) for output in outputs}) == 3


def test_salts_keep_tenants_apart(cached, plain):
    engine, prompt = cached(), ids_of(50)
    run(engine, [prompt], cache_salt="a")
    (other,) = run(engine, [prompt], cache_salt="b")
    (none,) = run(engine, [prompt])
    (same,) = run(engine, [prompt], cache_salt="a")
    assert other.num_cached_tokens == none.num_cached_tokens == 0
    assert same.num_cached_tokens >= 48
    assert ids([other, none, same]) == [plain(prompt)] * 3


def test_completions_of_one_prompt_share_its_blocks(cached, plain):
    engine, prompt = cached(), ids_of(64)
    several = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=4)
    (output,) = run(engine, [prompt], several)
    assert [c.token_ids for c in output.outputs] == [plain(prompt)] * 4
    stats = engine.stats()
    # The whole prompt is cached; each of the other three computes its last token, or its last block.
    last = 1 if engine.options.prefix_cache == "radix" else BLOCK
    assert stats["prefix_cache_queries"] - stats["prefix_cache_hits"] == 64 + 3 * last


@pytest.mark.parametrize("first", [None, 1])
def test_prompt_logprobs_are_computed_in_full_although_the_prompt_is_cached(cached, first):
    engine, prompt = cached(), ids_of(33)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (cold,) = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=first))
    (warm,) = run(engine, [prompt], scored)
    assert len(warm.prompt_logprobs) == 33 and warm.prompt_logprobs[0] is None
    values = [entry[token].logprob for token, entry in zip(prompt[1:], warm.prompt_logprobs[1:], strict=True)]
    engine.reset_prefix_cache()
    (again,) = run(engine, [prompt], scored)
    expected = [
        entry[token].logprob for token, entry in zip(prompt[1:], again.prompt_logprobs[1:], strict=True)
    ]
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert cold.num_cached_tokens == warm.num_cached_tokens == 0


def test_new_weights_empty_the_cache_and_are_refused_while_requests_run(config, params, plain):
    engine = engine_of(config, params)
    prompt = ids_of(50)
    assert ids(run(engine, [prompt])) == [plain(prompt)]
    other = tiny_params(config, seed=1)
    engine.add_request(prompt, GREEDY, request_id="busy")
    with pytest.raises(ValueError, match="update_params with 1 unfinished requests"):
        engine.update_params(other)
    finish(engine, ["busy"])
    with pytest.raises(ValueError, match="differ from the old ones"):
        engine.update_params(jax.tree.map(lambda x: x.astype("bfloat16"), other))
    engine.update_params(other)
    fresh = engine_of(config, other, prefix_cache="off")
    assert ids(run(engine, [prompt])) == ids(run(fresh, [prompt])) != [plain(prompt)]


# ---------------------------------------------------------------------------------------------
# Bitwise


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def weights(request, params, params_bf16):
    return params if request.param == "float32" else params_bf16


@pytest.fixture(scope="module")
def exact(config, weights):
    engine = engine_of(config, weights, deterministic=True, prefix_cache="off", overlap=False)
    return lambda prompt, sampling=EXACT: bits(run(engine, [prompt], sampling))[0]


@pytest.mark.parametrize("length", [16, 17, 48, 63])
def test_cold_and_warm_agree_bitwise(config, weights, exact, length):
    engine = engine_of(config, weights, deterministic=True)
    prompt = ids_of(length)
    assert bits(run(engine, [prompt] * 3, EXACT)) == [exact(prompt)] * 3
    assert bits(run(engine, [prompt, prompt[: length - 5] + [7]], EXACT)) == [
        exact(prompt),
        exact(prompt[: length - 5] + [7]),
    ]


def test_pressure_preemption_and_sharing_agree_bitwise(config, weights, exact):
    engine = engine_of(config, weights, deterministic=True, num_kv_blocks=14)
    prompts = [ids_of(40, seed % 3)[: 20 + seed] + ids_of(10, seed) for seed in range(16)]
    expected = [exact(prompt) for prompt in prompts]
    for _ in range(2):
        assert bits(run(engine, prompts, EXACT)) == expected
    assert engine.stats()["num_preemptions"] > 0 and engine.stats()["prefix_cache_hits"] > 0


def test_forks_agree_bitwise(config, weights, exact):
    engine = engine_of(config, weights, deterministic=True)
    prompt = ids_of(21)
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=20)
    name = engine.add_request(prompt, long, stream=False)
    for _ in range(6):
        engine.step()
    outputs = finish(engine, [name, *engine.fork(name, 2)])
    assert bits(outputs) == [exact(prompt, long)] * 3
