"""Scheduling on a fake device: who runs when, what is refused, what happens when memory runs out."""

from __future__ import annotations

import random

import pytest
from fake import drain, expected_output, fake_engine

from jpaged.sampling_params import SamplingParams


def greedy(max_tokens: int | None, **changes) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 301), k=length)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_others_run(overlap):
    engine = fake_engine(num_kv_blocks=8, overlap=overlap)
    with pytest.raises(
        ValueError, match=r"a prompt of 200 tokens can never fit.* 128 tokens \(8 blocks of 16\)"
    ):
        engine.add_request(prompt_of(200), greedy(5))
    ids = [engine.add_request(prompt_of(10, seed), greedy(5)) for seed in range(3)]
    outputs = drain(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [
        expected_output(prompt_of(10, seed), 5) for seed in range(3)
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sequence_that_outgrows_the_pool_ends_with_length_and_the_next_is_served(overlap):
    engine = fake_engine(num_kv_blocks=4, overlap=overlap)
    first = engine.add_request(prompt_of(20), greedy(200))
    second = engine.add_request(prompt_of(30, 1), greedy(3))
    outputs = drain(engine)
    # 64 slots hold 20 prompt and 44 generated tokens; the 45th is sampled and never stored.
    assert outputs[first].outputs[0].token_ids == expected_output(prompt_of(20), 45)
    assert outputs[first].outputs[0].finish_reason == "length"
    assert outputs[second].outputs[0].token_ids == expected_output(prompt_of(30, 1), 3)
    assert engine.scheduler.kv.num_active == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_go_on_as_if_nothing_had_happened(overlap):
    engine = fake_engine(num_kv_blocks=20, max_num_seqs=8, overlap=overlap)
    rng = random.Random(3)
    prompts = {f"r{i}": prompt_of(rng.randint(1, 60), i) for i in range(24)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(120), request_id=name)
    outputs = drain(engine)
    for name, prompt in prompts.items():
        completion = outputs[name].outputs[0]
        assert completion.token_ids == expected_output(prompt, 120)
        assert completion.finish_reason == "length"
        assert outputs[name].prompt_token_ids == prompt
    assert engine.stats()["num_preemptions"] > 0


def test_no_token_is_sampled_before_the_last_chunk_of_a_recompute():
    engine = fake_engine(max_num_batched_tokens=16)
    name = engine.add_request(prompt_of(3), greedy(90))
    steps = engine.runner.steps
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_output_tokens < 60:
        engine.step()
    known = engine.scheduler.running[0].num_tokens + engine.scheduler.running[0].num_pending
    engine.scheduler.preempt(engine.scheduler.running[0])
    before = len(steps)
    outputs = drain(engine)
    recompute = [step.sequences[0] for step in steps[before:] if step.sequences[0].start < known]
    assert [s.num_tokens for s in recompute[:-1]] == [16] * (len(recompute) - 1)
    assert [s.samples for s in recompute] == [False] * (len(recompute) - 1) + [True]
    assert outputs[name].outputs[0].token_ids == expected_output(prompt_of(3), 90)


def test_preemptions_of_long_requests_are_few():
    engine = fake_engine(num_kv_blocks=10, max_num_batched_tokens=16)
    names = [engine.add_request(prompt_of(100, seed), greedy(30)) for seed in range(2)]
    outputs = drain(engine)
    stats = engine.stats()
    assert all(outputs[name].metrics.num_preemptions <= 1 for name in names)
    assert stats["num_scheduled_tokens"] <= 2 * (100 + 30) + 130


def test_nobody_waits_while_a_row_blocks_and_tokens_are_free():
    """Work is conserved, over random traces."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=64)
        scheduler, schedule = engine.scheduler, engine.scheduler.schedule
        full_steps = 0

        def checked():
            nonlocal full_steps
            step = schedule()  # noqa: B023
            if scheduler.waiting and len(scheduler.running) < 4:  # noqa: B023
                assert step is not None and step.num_tokens == 32
                full_steps += 1
            return step

        scheduler.schedule = checked
        for _ in range(12):
            engine.add_request(prompt_of(rng.randint(1, 100), rng.random()), greedy(rng.randint(1, 60)))
        drain(engine)
        assert full_steps > 0 and max(len(step.sequences) for step in engine.runner.steps) == 4


def test_all_of_four_run_once_their_prefills_are_done():
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=32)
    for seed in range(4):
        engine.add_request(prompt_of(100, seed), greedy(200))
    sizes = []
    while engine.has_unfinished() and len(sizes) < 60:
        engine.step()
        sizes.append(len(engine.scheduler.running))
    assert sizes[20:] == [4] * 40


def test_short_prompts_do_not_wait_for_a_long_prefill_and_decodes_never_stall():
    engine = fake_engine(max_num_seqs=16, max_num_batched_tokens=64, num_kv_blocks=400, max_model_len=4000)
    decoding = engine.add_request(prompt_of(4, 9), greedy(100), request_id="decoding")
    engine.step()
    engine.add_request(prompt_of(2000), greedy(2), request_id="long")
    engine.step()
    for i in range(10):
        engine.add_request(prompt_of(8, i), greedy(5), request_id=f"short{i}")
    first_token: dict[str, int] = {}
    counts = []
    for number in range(200):
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids:
                first_token.setdefault(output.request_id, number)
            if output.request_id == decoding and not output.finished:
                counts.append(len(output.outputs[0].token_ids))
    # Half of the 63 prefill tokens of a step go to the ten prompts of 8: three steps, and one of overlap.
    assert all(first_token[f"short{i}"] <= 4 for i in range(10))
    assert counts == list(range(counts[0], 100))
    assert first_token["long"] < 80


def test_two_long_prompts_do_not_keep_a_short_one_out():
    engine = fake_engine(max_num_seqs=16, max_num_batched_tokens=64, num_kv_blocks=400, max_model_len=4000)
    for name in ("long0", "long1"):
        engine.add_request(prompt_of(2000), greedy(2), request_id=name)
    engine.step()
    engine.add_request(prompt_of(8), greedy(5), request_id="short")
    steps = 0
    while not any(output.request_id == "short" for output in engine.step()):
        steps += 1
    assert steps <= 4


def test_arrival_order_decides_who_is_admitted():
    engine = fake_engine(max_num_seqs=2)
    for i in range(6):
        engine.add_request(prompt_of(5, i), greedy(4), request_id=f"r{i}")
    drain(engine)
    admitted = [row.request_id.split("/")[0] for step in engine.runner.steps for row in step.admitted]
    assert admitted == [f"r{i}" for i in range(6)]


def test_a_finished_sequences_place_is_taken_at_the_next_step():
    engine = fake_engine(max_num_seqs=1, overlap=False)
    engine.add_request(prompt_of(5), greedy(2), request_id="a")
    engine.add_request(prompt_of(5, 1), greedy(2), request_id="b")
    drain(engine)
    owners = [[s.request_id[0] for s in step.sequences] for step in engine.runner.steps]
    assert owners == [["a"], ["a"], ["b"], ["b"]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", range(6))
def test_abort_at_any_moment_keeps_the_known_tokens_and_frees_everything(overlap, when):
    engine = fake_engine(max_num_batched_tokens=16, overlap=overlap)
    victim = engine.add_request(prompt_of(40), greedy(50), request_id="victim")
    other = engine.add_request(prompt_of(20, 1), greedy(30), request_id="other")
    outputs = {}
    for _ in range(when):
        outputs |= {output.request_id: output for output in engine.step()}
    known = len(outputs[victim].outputs[0].token_ids) if victim in outputs else 0
    engine.abort(victim)
    engine.abort(victim)
    engine.abort("unknown")
    outputs |= drain(engine)
    completion = outputs[victim].outputs[0]
    assert completion.finish_reason == "abort"
    assert completion.token_ids == expected_output(prompt_of(40), known)
    assert outputs[other].outputs[0].token_ids == expected_output(prompt_of(20, 1), 30)
    assert engine.scheduler.kv.num_active == 0 and not engine._sequences


@pytest.mark.parametrize("overlap", [True, False])
def test_an_id_can_be_used_again_right_after_an_abort(overlap):
    engine = fake_engine(overlap=overlap)
    engine.add_request(prompt_of(5), greedy(20), request_id="same")
    engine.step()
    engine.step()
    engine.abort("same")
    with pytest.raises(ValueError, match="request_id='same' is already in use"):
        engine.add_request(prompt_of(6, 1), greedy(7), request_id="same")
    engine.step()
    engine.add_request(prompt_of(6, 1), greedy(7), request_id="same")
    assert drain(engine)["same"].outputs[0].token_ids == expected_output(prompt_of(6, 1), 7)


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ids_end_a_sequence_and_are_named(overlap):
    engine = fake_engine(overlap=overlap)
    prompt = prompt_of(5)
    output = expected_output(prompt, 6)
    stops = SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[output[5]])
    engine.add_request(prompt, stops, request_id="a")
    engine.runner.scripts |= {"eos": [9, 2, 9], "eos/prompt": prompt}
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=50), request_id="eos")
    outputs = drain(engine)
    assert outputs["a"].outputs[0].token_ids == output
    assert (outputs["a"].outputs[0].finish_reason, outputs["a"].outputs[0].stop_reason) == ("stop", output[5])
    assert outputs["eos"].outputs[0].token_ids == [9, 2]
    assert (outputs["eos"].outputs[0].finish_reason, outputs["eos"].outputs[0].stop_reason) == ("stop", None)


@pytest.mark.parametrize("max_tokens", range(1, 41))
def test_every_end_within_a_block_leaves_an_empty_pool(max_tokens):
    engine = fake_engine(max_num_batched_tokens=4, max_num_seqs=2)
    name = engine.add_request(prompt_of(3), greedy(max_tokens))
    assert drain(engine)[name].outputs[0].token_ids == expected_output(prompt_of(3), max_tokens)
    stats = engine.stats()
    assert stats["kv_blocks_active"] == 0 and stats["kv_blocks_cached"] == (3 + max_tokens - 1) // 16
    engine.reset_prefix_cache()
    assert engine.scheduler.kv.pool.num_free == 64


def test_prompt_and_output_fit_max_model_len_exactly():
    engine = fake_engine(max_model_len=64)
    for max_tokens in (1, 2, None):
        name = engine.add_request(prompt_of(63), greedy(max_tokens))
        completion = drain(engine)[name].outputs[0]
        assert completion.token_ids == expected_output(prompt_of(63), 1)
        assert completion.finish_reason == "length"
    with pytest.raises(ValueError, match="64 tokens, at most 63 fit: .* max_model_len=64"):
        engine.add_request(prompt_of(64), greedy(1))
    # Nothing is generated, so a full context can be scored.
    name = engine.add_request(prompt_of(64), greedy(0))
    assert drain(engine)[name].outputs[0].token_ids == []


@pytest.mark.parametrize("bad", [[], [301], [-1], [2**31], [True], [1.5], ["5"], [None]])
def test_bad_ids_are_refused_and_leave_nothing_behind(bad):
    engine = fake_engine()
    with pytest.raises(ValueError, match="prompt"):
        engine.add_request(bad, greedy(1))
    assert not engine.has_unfinished()
    assert engine.add_request([300, 0], greedy(1)) and len(drain(engine)) == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fail_at", [0, 1, 5, 9])
def test_a_failing_step_loses_nothing(overlap, fail_at):
    engine = fake_engine(overlap=overlap, max_num_batched_tokens=16)
    prompts = {f"r{i}": prompt_of(10 + i, i) for i in range(6)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(12), request_id=name)
    engine.runner.fail_at = fail_at
    outputs = {}
    failures = 0
    while engine.has_unfinished():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            failures += 1
        engine.scheduler.check_invariants()
    assert failures == 1 and engine.runner.resets == 1
    assert {name: outputs[name].outputs[0].token_ids for name in prompts} == {
        name: expected_output(prompt, 12) for name, prompt in prompts.items()
    }


def test_n_completions_come_in_order_and_greedy_ones_are_equal():
    engine = fake_engine(max_num_seqs=2)
    name = engine.add_request(prompt_of(7), greedy(9, n=4))
    output = drain(engine)[name]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert [completion.token_ids for completion in output.outputs] == [expected_output(prompt_of(7), 9)] * 4
