"""After warm-up nothing compiles, whatever the traffic; and there is little to warm up."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.engine.metrics import compilations
from jpaged.engine.packing import declare_buckets
from jpaged.ops.sampling import Variant
from jpaged.sampling_params import SamplingParams

VOCABULARY = 293  # no other test has a model of this size, so none has compiled anything of it


class Characters:
    """A tokenizer of one character per id."""

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(256 + token) for token in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 256 for char in text if ord(char) >= 256]


def small_engine(vocab_size: int = VOCABULARY, **options) -> Engine:
    """One layer, one ragged bucket, and in bfloat16 one decode bucket: little to compile."""
    config = tiny_config(num_layers=1, vocab_size=vocab_size)
    params = tiny_params(config, dtype="bfloat16")
    sizes = dict(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=32, num_kv_blocks=14)
    return Engine(config, params, tokenizer=Characters(), **(sizes | options))


@pytest.fixture(scope="module")
def warm() -> Engine:
    engine = small_engine()
    engine.warmup()
    return engine


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of options; about half of the requests are plain."""

    def maybe(chance: float, **options) -> dict:
        return options if rng.random() < chance else {}

    def token() -> int:
        return int(rng.integers(3, VOCABULARY))

    options = dict(
        temperature=[0, 0.0, 1, 1.0, 0.7, np.float32(0.5)][rng.integers(6)],
        max_tokens=int(rng.integers(0, 14)),
    )
    if rng.random() < 0.5:
        options |= maybe(0.3, top_k=int(rng.integers(1, 400))) | maybe(0.3, top_p=float(rng.uniform(0.1, 1)))
        options |= maybe(0.2, min_p=0.1) | maybe(0.4, seed=int(rng.integers(0, 2**62)))
        options |= maybe(0.2, repetition_penalty=1.2) | maybe(0.2, presence_penalty=-1)
        options |= maybe(0.2, frequency_penalty=0.5) | maybe(0.2, logit_bias={token(): 5})
        options |= maybe(0.2, allowed_token_ids=[token() for _ in range(40)])
        options |= maybe(0.3, logprobs=int(rng.integers(0, 21))) | maybe(0.2, prompt_logprobs=2)
        options |= maybe(0.2, stop_token_ids=[token(), token()]) | maybe(0.2, ignore_eos=True)
        options |= maybe(0.2, bad_words=[chr(256 + token()), chr(256 + token()) + chr(256 + token())])
        options |= maybe(0.2, stop=chr(256 + token())) | maybe(0.2, min_tokens=options["max_tokens"] // 2)
        options |= maybe(0.2, n=2)
    return SamplingParams(**options)


def random_traffic(engine: Engine, count: int, seed: int) -> dict[str, int]:
    """Adds `count` requests while steps run, aborts and forks some; returns what happened how often."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCABULARY, 60).tolist()
    happened = dict(finished=0, forks=0, aborts=0)
    added, alive = 0, {}
    while added < count or engine.has_unfinished():
        for _ in range(rng.integers(0, 6)):
            if added < count:
                length = int(rng.integers(1, 60))
                own = rng.integers(3, VOCABULARY, length).tolist()
                prompt = own if rng.random() < 0.5 else (shared[:length] + own)[:70]
                params = random_params(rng)
                alive[engine.add_request(prompt, params)] = params
                added += 1
        if alive and rng.random() < 0.05:
            engine.abort(list(alive)[rng.integers(len(alive))])
            happened["aborts"] += 1
        for output in engine.step():
            if output.finished:
                happened["finished"] += 1
                alive.pop(output.request_id, None)
            elif len(output.outputs) == 1 and rng.random() < 0.05:
                for request_id in engine.fork(output.request_id):
                    alive[request_id] = alive[output.request_id]
                    happened["forks"] += 1
        assert happened["finished"] <= count + happened["forks"]
    assert happened["finished"] == count + happened["forks"]
    return happened


def test_compilations_are_counted():
    before = compilations.count
    jax.jit(lambda x: x * 3 + 1)(jnp.zeros(977))
    assert compilations.count > before


def test_random_traffic_compiles_nothing_after_warm_up(warm):
    before = compilations.count
    happened = random_traffic(warm, 300, seed=0)
    assert compilations.count == before
    stats = warm.stats()
    assert min(happened.values()) > 5, happened
    assert stats["num_preemptions"] > 5 and stats["prefix_cache_copies"] > 5
    assert stats["prefix_cache_evictions"] > 5 and stats["num_requests_running_peak"] == 8


@pytest.mark.parametrize("bound", [False, True])
def test_no_bucket_compiles_again_whether_weights_are_bound_to_a_device_or_not(bound):
    """Orbax restores arrays that are bound to a device, and then all that a step returns is."""
    config = tiny_config(num_layers=1, vocab_size=VOCABULARY + 2 + bound)
    params = tiny_params(config)
    if bound:
        params = jax.device_put(params, jax.devices()[0])
    engine = Engine(config, params, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32)
    engine.warmup((Variant.GREEDY,))
    before = compilations.count
    for length in (3, 5, 7):
        engine.add_request(list(range(3, 3 + length)), SamplingParams(temperature=0, max_tokens=length))
    while engine.has_unfinished():
        engine.step()
    assert compilations.count == before
    if not bound:
        engine.update_params(jax.device_put(tiny_params(config, seed=1), jax.devices()[0]))
        engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=3))
        while engine.has_unfinished():
            engine.step()
        assert compilations.count == before


def test_recovery_compiles_nothing(warm):
    before = compilations.count
    warm.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=3))
    warm.step()
    warm._restart()
    while warm.has_unfinished():
        warm.step()
    assert compilations.count == before


def test_warming_up_again_compiles_nothing(warm):
    before = compilations.count
    warm.warmup()
    assert compilations.count == before


def test_greedy_traffic_needs_the_greedy_variant_alone():
    engine = small_engine(VOCABULARY + 1)
    engine.warmup((Variant.GREEDY,))
    before = compilations.count
    rng = np.random.default_rng(1)
    for temperature in (0, 0.0, 1e-6, np.float64(0)):
        for length in (1, 15, 33, 70, 8):
            params = SamplingParams(temperature=temperature, max_tokens=6, stop_token_ids=[5], seed=3, n=2)
            engine.add_request(rng.integers(3, VOCABULARY, length).tolist(), params)
    while engine.has_unfinished():
        engine.step()
    assert compilations.count == before
    engine.add_request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=1))
    engine.step()
    assert compilations.count > before, "the sampled variant was not warmed up, so this must compile"
    while engine.has_unfinished():
        engine.step()


def test_deterministic_traffic_compiles_nothing_after_warm_up():
    engine = small_engine(VOCABULARY + 2, deterministic=True)
    engine.warmup((Variant.GREEDY,))
    before = compilations.count
    rng = np.random.default_rng(1)
    for length in (1, 15, 33, 70, 8) * 2:
        params = SamplingParams(temperature=0, max_tokens=6)
        engine.add_request(rng.integers(3, VOCABULARY, length).tolist(), params)
    while engine.has_unfinished():
        engine.step()
    assert compilations.count == before


# ---------------------------------------------------------------------------------------------
# Buckets

SIZES = [(1, 1), (1, 512), (7, 7), (8, 64), (64, 512), (256, 2048), (300, 5000), (1024, 16384), (4096, 2**20)]


@pytest.mark.parametrize(("seqs", "tokens"), SIZES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_number_of_buckets_grows_as_a_logarithm(seqs, tokens, deterministic):
    buckets = declare_buckets(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, min_decode=1, deterministic=deterministic
    )
    assert len(buckets.decode) <= 2 + max(0, math.ceil(math.log2(seqs / 8)))
    assert len(buckets.ragged) <= 2 * (1 + max(0, math.ceil(math.log(tokens / 32, 4))))
    assert (len(buckets.decode) == 0) == deterministic


@pytest.mark.parametrize(("seqs", "tokens"), SIZES[:-2])
@pytest.mark.parametrize("min_decode", [1, 8])
def test_every_step_has_a_bucket_that_is_not_much_larger(seqs, tokens, min_decode):
    buckets = declare_buckets(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, min_decode=min_decode, deterministic=False
    )
    for count in range(1, seqs + 1):
        assert count <= buckets.for_decode(count) <= min(max(8, 2 * count - 1), seqs)
    for count in range(1, tokens + 1, max(1, tokens // 200)):
        for sequences in {1, min(8, count, seqs), min(9, count, seqs), min(count, seqs)}:
            got = buckets.for_ragged(count, sequences)
            assert count <= got[0] <= min(max(32, 4 * count - 1), tokens)
            assert sequences <= got[1] <= min(got[0], seqs)
            assert sequences > 8 or got[1] <= 8
