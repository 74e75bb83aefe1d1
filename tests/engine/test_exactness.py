"""Every switch gives the reference's greedy ids; with `deterministic` the same bits.

The reference is one request at a time, in float32, with a large pool and no chunking.
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.request import RequestOutput
from jpaged.sampling_params import SamplingParams

MAX_TOKENS = 20
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 70, 5, 100)


def make_prompts(seed: int = 0, vocab_size: int = 301) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, n).tolist() for n in LENGTHS]


def engine_of(config, params, **options) -> Engine:
    sizes = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=128)
    return Engine(config, params, **(sizes | options))


def run(engine: Engine, prompts, params=None, *, check: bool = True, order=None) -> list[RequestOutput]:
    """Runs prompts together and returns their outputs in the order of `prompts`."""
    params = params or SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for index in order or range(len(prompts)):
        own = params[index] if isinstance(params, list) else params
        engine.add_request(prompts[index], own, request_id=str(index), stream=False)
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output
        if check:
            engine.scheduler.check_invariants()
    assert engine.scheduler.kv.num_active == 0
    return [done[str(index)] for index in range(len(prompts))]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def bits(outputs: list[RequestOutput]) -> list[tuple]:
    """Ids and all log-probabilities, exactly."""
    return [
        (o.token_ids, [[(i, lp.logprob, lp.rank) for i, lp in step.items()] for step in o.logprobs])
        for output in outputs
        for o in output.outputs
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def reference(config, params, prompts) -> list[list[int]]:
    engine = engine_of(config, params, max_num_seqs=1, max_num_batched_tokens=160, overlap=False)
    return [ids(run(engine, [prompt]))[0] for prompt in prompts]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 32])
def test_batch_size_changes_no_id(config, params, prompts, reference, batch, overlap):
    engine = engine_of(config, params, max_num_seqs=batch, max_num_batched_tokens=256, overlap=overlap)
    assert ids(run(engine, prompts)) == reference


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_chunk_size_changes_no_id(config, params, prompts, reference, chunk):
    engine = engine_of(config, params, max_num_seqs=min(5, chunk), max_num_batched_tokens=chunk)
    assert ids(run(engine, prompts)) == reference


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pool_under_pressure_preempts_and_changes_no_id(config, params, prompts, reference, overlap):
    engine = engine_of(config, params, num_kv_blocks=10, overlap=overlap)
    assert ids(run(engine, prompts)) == reference
    assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [16, 64])
def test_each_request_preempted_once_gives_the_same_ids(config, params, prompts, reference, overlap, chunk):
    engine = engine_of(config, params, max_num_batched_tokens=chunk, overlap=overlap)
    preempted = preempt_each_once(engine, after=7)
    assert ids(run(engine, prompts)) == reference
    assert len(preempted) == len(prompts)


def preempt_each_once(engine: Engine, after: int) -> set[str]:
    """From now on every request is preempted once, when it has `after` output tokens."""
    preempted: set[str] = set()
    schedule = engine.scheduler.schedule

    def preempting():
        for request in list(engine.scheduler.running):
            if request.num_output_tokens >= after and request.request_id not in preempted:
                preempted.add(request.request_id)
                engine.scheduler.preempt(request)
        return schedule()

    engine.scheduler.schedule = preempting
    return preempted


@pytest.mark.parametrize("seed", [1, 2])
def test_order_of_arrival_changes_no_id(config, params, prompts, reference, seed):
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    assert ids(run(engine_of(config, params), prompts, order=order)) == reference


@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
def test_block_size_changes_no_id(config, params, prompts, reference, block_size):
    engine = engine_of(config, params, block_size=block_size, num_kv_blocks=8 * 160 // block_size)
    assert ids(run(engine, prompts)) == reference


@pytest.mark.parametrize("window", [4, 20])
def test_sliding_windows_change_no_id_under_any_schedule(prompts, window):
    config = tiny_config(layer_windows=(window, None))
    params = tiny_params(config)
    alone = engine_of(config, params, max_num_seqs=1, max_num_batched_tokens=160)
    expected = [ids(run(alone, [prompt]))[0] for prompt in prompts]
    assert (
        ids(run(engine_of(config, params, num_kv_blocks=16, max_num_batched_tokens=16), prompts)) == expected
    )


def poison(engine: Engine, value: float = np.nan) -> None:
    """Fills every slot of the pool, the null block included, with `value`."""

    def fill(array):
        dtype = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn}.get(
            str(array.dtype), array.dtype
        )
        filled = np.full(array.shape, value if dtype != np.int8 else 99).astype(dtype)
        return jax.numpy.asarray(filled.view(array.dtype))

    engine.runner.cache = jax.tree.map(fill, engine.runner.cache)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "value"),
    [
        ("auto", np.nan),
        ("auto", np.inf),
        ("bfloat16", np.nan),
        *((f, np.inf) for f in ("int8", "fp8_e4m3", "int4")),
    ],
)
def test_what_unused_slots_hold_never_leaks(config, params, prompts, value, kv_cache_dtype):
    expected = ids(run(engine_of(config, params, num_kv_blocks=40, kv_cache_dtype=kv_cache_dtype), prompts))
    engine = engine_of(config, params, num_kv_blocks=40, kv_cache_dtype=kv_cache_dtype)
    poison(engine, value)
    assert ids(run(engine, prompts)) == expected


# ---------------------------------------------------------------------------------------------
# Bitwise

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def weights(request, params, params_bf16):
    return params if request.param == "float32" else params_bf16


@pytest.fixture(scope="module")
def exact_bits(config, weights, prompts):
    engine = engine_of(config, weights, deterministic=True, overlap=False)
    return [bits(run(engine, [prompt], GREEDY))[0] for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(overlap=False),
        dict(num_kv_blocks=10),
        dict(max_num_batched_tokens=256),
        dict(max_num_seqs=5, max_num_batched_tokens=5),
        dict(max_num_seqs=1, max_num_batched_tokens=16),
        dict(max_num_seqs=32),
    ],
    ids=["batched", "no-overlap", "pressure", "large-steps", "chunks-of-5", "alone", "32-rows"],
)
def test_deterministic_is_bitwise(config, weights, prompts, exact_bits, options):
    engine = engine_of(config, weights, deterministic=True, **options)
    assert bits(run(engine, prompts, GREEDY)) == exact_bits
    if "num_kv_blocks" in options:
        assert engine.stats()["num_preemptions"] > 0


def test_deterministic_is_bitwise_when_each_request_is_preempted(config, weights, prompts, exact_bits):
    engine = engine_of(config, weights, deterministic=True)
    preempted = preempt_each_once(engine, after=3)
    assert bits(run(engine, prompts, GREEDY)) == exact_bits
    assert len(preempted) == len(prompts)


def test_deterministic_is_bitwise_in_any_order(config, weights, prompts, exact_bits):
    order = list(reversed(range(len(prompts))))
    engine = engine_of(config, weights, deterministic=True)
    assert bits(run(engine, prompts, GREEDY, order=order)) == exact_bits
