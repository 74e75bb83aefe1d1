"""With a quantized KV cache, too, a prompt gives the same ids however it is computed.

The reference is one request at a time, in one chunk, without a prefix cache. Entries are fixed when they are
written, so hits, chunks, preemption and forks read what a cold run reads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.kv_cache import KVLayout, bytes_per_block
from jpaged.request import RequestOutput
from jpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KV_DTYPES = ("float16", "int8", "fp8_e4m3", "int4")
SHARED = np.random.default_rng(0).integers(3, 301, 21).tolist()
PROMPTS = [[*SHARED, *np.random.default_rng(i).integers(3, 301, 5 * i).tolist()] for i in range(6)]


@pytest.fixture(scope="module")
def model():
    """With attention biases, whose channels are what low precisions suffer from."""
    config = tiny_config(qkv_bias=True)
    return config, tiny_params(config)


@pytest.fixture(scope="module", params=KV_DTYPES)
def engine_of(request, model):
    def make(**options) -> Engine:
        sizes = dict(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=64)
        return Engine(*model, kv_cache_dtype=request.param, **(sizes | options))

    return make


def run(engine: Engine, prompts, params=GREEDY) -> list[list[list[int]]]:
    names = [engine.add_request(prompt, params, stream=False) for prompt in prompts]
    return finish(engine, names)


def finish(engine: Engine, names: list[str]) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in drain(engine, names)]


def drain(engine: Engine, names: list[str]) -> list[RequestOutput]:
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
    return [done[name] for name in names]


@pytest.fixture(scope="module")
def reference(engine_of):
    engine = engine_of(prefix_cache="off", max_num_seqs=1, max_num_batched_tokens=96)
    return [run(engine, [prompt])[0] for prompt in PROMPTS]


def test_batches_with_prefix_hits(engine_of, reference):
    engine = engine_of()
    assert run(engine, PROMPTS) == reference
    assert run(engine, PROMPTS) == reference
    assert engine.stats()["prefix_cache_hits"] > 0 and engine.stats()["prefix_cache_copies"] > 0


def test_chunks(engine_of, reference):
    assert run(engine_of(max_num_batched_tokens=5, max_num_seqs=4), PROMPTS) == reference


def test_preemption(engine_of, reference):
    engine = engine_of(num_kv_blocks=9)
    assert run(engine, PROMPTS) == reference
    assert engine.stats()["num_preemptions"] > 0


def test_forks_and_several_completions(engine_of, reference):
    engine = engine_of()
    name = engine.add_request(PROMPTS[2], GREEDY, stream=False)
    for _ in range(6):
        engine.step()
    assert finish(engine, [name, *engine.fork(name, 2)]) == [reference[2]] * 3
    several = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=3)
    assert run(engine, [PROMPTS[3]], several) == [reference[3] * 3]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
def test_kernels_give_the_ids_of_xla(kv_cache_dtype):
    config = tiny_config(head_dim=64, num_layers=1)
    params = tiny_params(config)
    sizes = dict(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=8)
    got = [
        run(
            Engine(config, params, attention_backend=backend, kv_cache_dtype=kv_cache_dtype, **sizes),
            PROMPTS[:4],
        )
        for backend in ("xla", "pallas_interpret")
    ]
    assert got[0] == got[1]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_a_layer_can_be_exempted(model, kv_cache_dtype):
    config, params = model
    sizes = dict(max_model_len=96, max_num_seqs=8, num_kv_blocks=64)
    engine = Engine(config, params, kv_cache_dtype=kv_cache_dtype, kv_cache_skip_layers=(1,), **sizes)
    formats = [
        (k.format, v.format) for k, v in zip(engine.runner.cache.k, engine.runner.cache.v, strict=True)
    ]
    assert formats == [("int8", kv_cache_dtype), ("float32", "float32")]
    layout = KVLayout.of(config, "float32", kv_cache_dtype, (1,))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.cache))
    assert total == 65 * engine.stats()["kv_block_bytes"] == 65 * bytes_per_block(config, 16, layout)
    assert all(len(tokens) == 20 for (tokens,) in run(engine, PROMPTS))


def test_a_prompt_that_runs_twice_with_deterministic_has_the_same_bits(model):
    exact = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    engine = Engine(
        *model, kv_cache_dtype="int4", deterministic=True, max_model_len=96, max_num_seqs=4, num_kv_blocks=64
    )
    logprobs = []
    for prompts in (PROMPTS[3:4], PROMPTS[3:4], PROMPTS[3:] + PROMPTS[:3]):
        first, *_ = drain(engine, [engine.add_request(prompt, exact, stream=False) for prompt in prompts])
        logprobs.append([{i: lp.logprob for i, lp in step.items()} for step in first.outputs[0].logprobs])
    assert logprobs[0] == logprobs[1] == logprobs[2]


def prompt_logprobs(config, params, kv_cache_dtype: str) -> np.ndarray:
    """Log-probability of each token of `PROMPTS`, read through a cache of that dtype."""
    engine = Engine(config, params, kv_cache_dtype=kv_cache_dtype, max_model_len=96, num_kv_blocks=64)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    names = [engine.add_request(prompt, asked, stream=False) for prompt in PROMPTS]
    return np.array([
        step[token].logprob
        for output, prompt in zip(drain(engine, names), PROMPTS, strict=True)
        for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("int8", 0.05), ("fp8_e4m3", 0.3), ("int4", 0.25)])
def test_outlying_channels_of_the_keys_do_no_harm(kv_cache_dtype, most):
    """Attention biases make single channels of the keys large: what breaks keys of few bits."""
    config = tiny_config(qkv_bias=True, num_heads=3, num_kv_heads=3, head_dim=32)
    params = tiny_params(config)
    biases = np.zeros((3, 3, 32), np.float32)  # per KV head: one query head, the key, the value
    biases[:, 1, 5], biases[:, 1, 30] = 40.0, -25.0
    layers = tuple(
        dataclasses.replace(layer, bqkv=jnp.asarray(biases.reshape(-1))) for layer in params.layers
    )
    params = dataclasses.replace(params, layers=layers)
    exact = prompt_logprobs(config, params, "float32")
    error = np.abs(prompt_logprobs(config, params, kv_cache_dtype) - exact)
    assert 0 < error.mean() < most  # of 6.3 in the mean
