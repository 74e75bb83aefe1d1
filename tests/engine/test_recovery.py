"""A step that fails, in whatever way, leaves an engine that goes on and loses nothing."""

from __future__ import annotations

import dataclasses
import gc

import jax
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine import runner as runner_module
from jpaged.engine.engine import Engine
from jpaged.request import RequestOutput
from jpaged.sampling_params import SamplingParams


class Characters:
    """A tokenizer of one character per id."""

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(256 + token) for token in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 256 for char in text if ord(char) >= 256]


def engine_of(config, params, **options) -> Engine:
    """One ragged bucket, and the sizes of test_exactness otherwise: so little is compiled."""
    sizes = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=32, num_kv_blocks=128)
    return Engine(config, params, tokenizer=Characters(), **(sizes | options))


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 301, length).tolist()


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = prompt_of(90, 1)
STOPS = "".join(chr(256 + token) for token in range(3, 301, 9))  # one token in nine is a stop string

REQUESTS = [
    (prompt_of(17, 2), GREEDY),
    (LONG, dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)),
    (LONG[:50] + [5, 6], GREEDY),  # shares a prefix
    (prompt_of(5, 3), SamplingParams(seed=1, max_tokens=20, stop=list(STOPS))),
    (prompt_of(33, 4), SamplingParams(n=3, seed=2, max_tokens=15, stop_token_ids=range(3, 40))),
    (prompt_of(40, 5), dataclasses.replace(GREEDY, max_tokens=0, prompt_logprobs=0)),
    (prompt_of(2, 6), SamplingParams(seed=3, max_tokens=12, presence_penalty=1.0, min_tokens=12)),
    (prompt_of(20, 7), SamplingParams(n=2, seed=9, max_tokens=9, prompt_logprobs=0, stop=list(STOPS))),
]


def add_all(engine: Engine) -> list[str]:
    return [engine.add_request(prompt, params) for prompt, params in REQUESTS]


def summary(output: RequestOutput) -> tuple:
    """All that must not depend on what went wrong on the way."""
    assert output.error is None
    prompt_ids = output.prompt_logprobs and [x and sorted(x) for x in output.prompt_logprobs]
    completions = []
    for o in output.outputs:
        logprobs = o.logprobs and [list(entries) for entries in o.logprobs]
        completions.append((o.index, o.token_ids, o.text, o.finish_reason, o.stop_reason, logprobs))
    return completions, prompt_ids


def drain(engine: Engine, failures: tuple[type[BaseException], ...] = ()) -> tuple[dict, int]:
    """Last outputs by id, and how often a step failed; ids and texts may only grow on the way."""
    done: dict[str, RequestOutput] = {}
    failed = 0
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except failures:
            failed += 1
            outputs = []
        engine.scheduler.check_invariants()
        for output in outputs:
            before = done.get(output.request_id)
            assert before is None or not before.finished
            for old, new in zip(before.outputs if before else [], output.outputs, strict=False):
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
            done[output.request_id] = output
    return done, failed


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["kv_blocks_active"] == 0
    assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]
    assert not engine._groups and not engine._sequences and not engine.scheduler.has_unfinished
    engine.reset_prefix_cache()
    assert engine.stats()["kv_blocks_free"] == stats["kv_blocks_total"]


@pytest.fixture(scope="module")
def expected(config, params) -> list[tuple]:
    engine = engine_of(config, params)
    names = add_all(engine)
    done, _ = drain(engine)
    outputs = [summary(done[name]) for name in names]
    assert [len(o[2]) < len(o[1]) for o in outputs[3][0]] == [True], "no stop string was found"
    return outputs


# ---------------------------------------------------------------------------------------------
# Ways to fail: each makes the next call fail once


class Broken(RuntimeError):
    pass


def fail_once(owner, name: str, patch: pytest.MonkeyPatch, instead) -> None:
    real = getattr(owner, name)

    def failing(*args, **kwargs):
        patch.setattr(owner, name, real)
        return instead(real, *args, **kwargs)

    patch.setattr(owner, name, failing)


def after_donation(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The step ran, the buffers it was given are gone, and its result never came."""
    runner = engine.runner

    def broken(real, *args):
        given = runner.cache, runner.state
        real(*args)
        runner.cache, runner.state = given
        assert runner.cache.k[0].data.is_deleted() and runner.state.last_token.is_deleted()
        raise Broken

    fail_once(runner, "_dispatch", patch, broken)


def before_dispatch(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def broken(real, *args):
        raise Broken

    fail_once(engine.runner.packer, "pack", patch, broken)


def interrupted_while_waiting(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def broken(real, handle):
        raise KeyboardInterrupt

    fail_once(runner_module.DeviceHandle, "result", patch, broken)


def interrupted_after_update(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The tokens are noted already, and nobody has seen them."""

    def broken(real, *args):
        real(*args)
        raise KeyboardInterrupt

    fail_once(engine.scheduler, "update", patch, broken)


def interrupted_before_collecting(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def broken(real, *args):
        raise KeyboardInterrupt

    fail_once(engine, "_collect", patch, broken)


FAULTS = [
    after_donation,
    before_dispatch,
    interrupted_while_waiting,
    interrupted_after_update,
    interrupted_before_collecting,
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_at_any_step_changes_no_output(config, params, expected, fault, overlap):
    """Each round fails one step later; the same engine serves all rounds."""
    engine = engine_of(config, params, overlap=overlap)
    for at in (0, 1, 2, 4, 7, 11, 14, 17):
        names = add_all(engine)
        early: dict[str, RequestOutput] = {}
        for _ in range(at):
            early |= {output.request_id: output for output in engine.step() if output.finished}
        with pytest.MonkeyPatch.context() as patch:
            fault(engine, patch)
            done, failed = drain(engine, (Broken, KeyboardInterrupt))
        assert failed == 1
        done |= early
        assert [summary(done[name]) for name in names] == expected, f"failed at step {at}"
        assert_idle(engine)


def test_a_step_that_fails_again_and_again_loses_nothing(config, params, expected):
    engine = engine_of(config, params)
    names = add_all(engine)
    done: dict[str, RequestOutput] = {}
    with pytest.MonkeyPatch.context() as patch:
        for fault in FAULTS * 2:
            fault(engine, patch)
            with pytest.raises((Broken, KeyboardInterrupt)):
                for _ in range(3):
                    done |= {o.request_id: o for o in engine.step() if o.finished}
            engine.scheduler.check_invariants()
    done |= drain(engine)[0]
    assert [summary(done[name]) for name in names] == expected


def test_a_request_can_be_aborted_after_a_failed_step(config, params, expected):
    engine = engine_of(config, params)
    names = add_all(engine)
    for _ in range(3):
        engine.step()
    with pytest.MonkeyPatch.context() as patch:
        after_donation(engine, patch)
        with pytest.raises(Broken):
            engine.step()
    for name in names[1:]:
        engine.abort(name)
    done, _ = drain(engine)
    assert summary(done[names[0]]) == expected[0]
    assert {o.finish_reason for name in names[1:] for o in done[name].outputs} == {"abort"}
    assert_idle(engine)


def test_the_old_pools_are_gone_before_new_ones_are_made(config, params, monkeypatch):
    """A pool may fill most of the memory: two of them do not fit."""
    engine = engine_of(config, params)
    add_all(engine)
    for _ in range(3):
        engine.step()
    shape = engine.runner.cache.k[0].data.shape
    gc.collect()
    others = pools_alive(shape) - 2 * config.num_layers
    make, alive = runner_module.init_kv_cache, []

    def watching(*args):
        alive.append(pools_alive(shape) - others)
        return make(*args)

    monkeypatch.setattr(runner_module, "init_kv_cache", watching)
    interrupted_while_waiting(engine, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert alive == [0]


def pools_alive(shape: tuple[int, ...]) -> int:
    return sum(array.shape == shape and not array.is_deleted() for array in jax.live_arrays())


# ---------------------------------------------------------------------------------------------
# NaN checks of JAX itself


@pytest.fixture
def debug_nans():
    with jax.debug_nans(True):
        yield


def test_healthy_requests_pass_the_nan_checks_of_jax(config, params, expected, debug_nans):
    engine = engine_of(config, params)
    names = add_all(engine)
    done, _ = drain(engine)
    assert [summary(done[name]) for name in names] == expected
    assert_idle(engine)


def test_a_nan_found_by_jax_leaves_a_usable_engine(config, params, expected, debug_nans):
    """NaN in the embedding of one token, that only the first request has."""
    healthy = REQUESTS[0][0] + expected[0][0][0][1]
    token = next(token for token in range(3, 301) if token not in healthy)
    with jax.debug_nans(False):
        embed = params.embed.at[token].set(np.nan)
    sick = engine_of(config, dataclasses.replace(params, embed=embed))
    bad = sick.add_request([9, token, 10], GREEDY)
    name = sick.add_request(*REQUESTS[0])
    with pytest.raises(Exception, match=r"(?i)nan|deleted|donated"):
        for _ in range(3):
            sick.step()
    sick.scheduler.check_invariants()
    sick.abort(bad)
    done, _ = drain(sick)
    assert summary(done[name]) == expected[0]
    assert done[bad].outputs[0].finish_reason == "abort"
    assert_idle(sick)


# ---------------------------------------------------------------------------------------------
# Several engines, and none


def test_two_engines_take_turns_and_do_not_disturb_each_other(config, params, expected):
    """Of the same sizes and of others, with the same weights and with others."""
    first, second = engine_of(config, params), engine_of(config, tiny_params(config, seed=1))
    names, others = add_all(first), add_all(second)
    done: dict[str, RequestOutput] = {}
    theirs: dict[str, RequestOutput] = {}
    while first.has_unfinished() or second.has_unfinished():
        done.update((output.request_id, output) for output in first.step())
        theirs.update((output.request_id, output) for output in second.step())
    assert [summary(done[name]) for name in names] == expected
    alone = engine_of(config, tiny_params(config, seed=1))
    again = add_all(alone)
    last, _ = drain(alone)
    assert [summary(theirs[name]) for name in others] == [summary(last[name]) for name in again] != expected


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_is_deleted_frees_its_pools(config, params, busy):
    shape = (128 + 1, config.num_kv_heads, 16, config.head_dim)
    gc.collect()
    before = pools_alive(shape)
    engine = engine_of(config, params)
    assert pools_alive(shape) == before + 2 * config.num_layers
    names = add_all(engine)
    if busy:
        engine.step()
        engine.step()
    else:
        assert drain(engine)[0].keys() == set(names)
    del engine
    gc.collect()
    assert pools_alive(shape) == before


def test_a_deleted_engine_can_be_made_again(expected):
    for _ in range(2):
        config = tiny_config()
        engine = engine_of(config, tiny_params(config))
        name = engine.add_request(*REQUESTS[0])
        assert summary(drain(engine)[0][name]) == expected[0]
        del engine
