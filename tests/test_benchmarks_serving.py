"""The harness: what it counts, what it calls a rate, and what it refuses to measure."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from conftest import tiny_config, tiny_params
from fake import expected_output, fake_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import throughput
from serving import RequestTrace, Sample, Trace, distribution, greedy, serve, summarize
from static_batches import ReservingKVManager, StaticEngine
from workloads import BenchRequest, full_lengths, multi_turn_requests, random_requests

from jpaged import Engine, SamplingParams
from jpaged.weights import orbax

HF_PEER = Path(__file__).parents[1] / "benchmarks" / "peers" / "hf.py"


def prompts(count: int, *, seed: int = 0, lengths=(5, 30), outputs=(4, 12)) -> list[BenchRequest]:
    return random_requests(count, lengths, outputs, seed=seed, vocab_size=301)


def test_counts_are_of_ids_produced_not_of_ids_asked_for():
    """Most stop early; one is refused."""
    requests = prompts(6, outputs=(20, 20))
    requests.append(BenchRequest([7] * 2000, 20))  # longer than the engine takes
    engine = fake_engine()
    wanted = [expected_output(r.prompt_token_ids, 20) for r in requests[:6]]
    stops = {wanted[0][3], wanted[1][5], wanted[2][0]}
    lengths = [next((i + 1 for i, t in enumerate(ids) if t in stops), 20) for ids in wanted]
    assert sum(lengths) < 80

    def stopping(request: BenchRequest) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=request.output_len, stop_token_ids=sorted(stops), ignore_eos=True
        )

    trace = serve(engine, requests, stopping)
    assert [r.outputs for r in trace.requests[:6]] == [
        [ids[:length]] for ids, length in zip(wanted, lengths, strict=True)
    ]
    figures = summarize(trace)
    assert figures["output_tokens"] == sum(lengths)
    assert figures["failed"] == 1 and "at most" in trace.requests[6].error
    assert figures["input_tokens"] == sum(len(r.prompt_token_ids) for r in requests[:6])
    assert figures["output_tokens_per_s"] == pytest.approx(sum(lengths) / trace.elapsed)


def test_several_completions_count_each_and_their_prompt_once():
    request = BenchRequest([5, 6, 7], 4)
    trace = serve(
        fake_engine(),
        [request],
        lambda r: SamplingParams(max_tokens=4, n=2, ignore_eos=True, temperature=1.0),
    )
    figures = summarize(trace)
    assert figures["output_tokens"] == 8 and figures["input_tokens"] == 3
    assert [len(times) for times in trace.requests[0].token_times] == [4, 4]


def test_recomputed_tokens_are_no_throughput():
    requests = prompts(12, lengths=(10, 20), outputs=(40, 60))
    engine = fake_engine(num_kv_blocks=10, prefix_cache="off")
    trace = serve(engine, requests)
    figures = summarize(trace)
    assert figures["preemptions"] > 0
    assert figures["input_tokens"] == sum(len(r.prompt_token_ids) for r in requests)
    assert figures["output_tokens"] == sum(r.output_len for r in requests)
    assert figures["scheduled_tokens"] > figures["input_tokens"] + figures["output_tokens"]
    assert all(
        [t.outputs[0]] == [expected_output(r.prompt_token_ids, r.output_len)]
        for t, r in zip(trace.requests, requests, strict=True)
    )


def test_every_token_has_a_time_and_times_do_not_run_backwards():
    requests = prompts(9)
    trace = serve(fake_engine(), requests, arrivals=[0.002 * i for i in range(9)])
    for request, entry in zip(requests, trace.requests, strict=True):
        (times,) = entry.token_times
        assert len(times) == request.output_len and times == sorted(times)
        assert entry.arrival <= times[0] and times[-1] == entry.finished <= trace.elapsed
    assert [entry.arrival for entry in trace.requests] == [0.002 * i for i in range(9)]


def test_a_turn_contains_the_answer_before_it():
    requests = multi_turn_requests(2, 3, turn_len=20, answer_len=6, seed=0, vocab_size=301)
    trace = serve(fake_engine(), requests)
    history = [[], []]
    for index, (request, entry) in enumerate(zip(requests, trace.requests, strict=True)):
        prompt = history[index % 2] + request.prompt_token_ids
        assert entry.input_tokens == len(prompt)
        assert entry.outputs == [expected_output(prompt, 6)]
        history[index % 2] = prompt + entry.outputs[0]
        if request.after is not None:
            assert entry.arrival == trace.requests[request.after].finished
    assert summarize(trace)["hit_tokens"] > 0


def test_what_follows_a_failed_turn_fails_with_it():
    requests = [BenchRequest([5] * 2000, 3), BenchRequest([5], 3, after=0), BenchRequest([6], 3)]
    figures = summarize(serve(fake_engine(), requests))
    assert figures["failed"] == 2 and figures["output_tokens"] == 3


def test_each_run_starts_from_an_empty_prefix_cache():
    requests, engine = prompts(3, lengths=(40, 40)), fake_engine()
    hits = [summarize(serve(engine, requests))["hit_tokens"] for _ in range(2)]
    assert hits == [0, 0]


def known_trace() -> Trace:
    """10 requests of 1,000 prompt and 10 output tokens; request i's ids come at 1 + i + 0.1 j seconds."""
    requests = [
        RequestTrace(1000, 0.5 * i, [[1 + i + 0.1 * j for j in range(10)]], [list(range(10))], 1.9 + i)
        for i in range(10)
    ]
    requests.append(RequestTrace(1000, 0.0, error="refused"))
    stats = dict(
        num_steps=100, num_preemptions=3, num_scheduled_tokens=8100, num_requests_running_peak=2,
        prefix_cache_hits=2000, host_seconds=dict(schedule=0.1, dispatch=0.2, update=0.05, outputs=0.05),
        device_wait_seconds=15.0, device_busy_seconds=18.0,
    )  # fmt: skip
    samples = [Sample(1.0, 1, 100, 80), Sample(2.0, 2, 300, 220)]
    return Trace(requests, 20.0, samples, stats)


def test_rates_of_a_known_trace_are_those_of_a_hand_calculation():
    figures = summarize(known_trace())
    assert (figures["requests"], figures["failed"]) == (11, 1)
    assert figures["input_tokens_per_s"] == 500.0
    assert figures["output_tokens_per_s"] == 5.0
    assert figures["total_tokens_per_s"] == 505.0
    assert figures["hit_tokens"] == 2000
    assert figures["kv_waste"] == pytest.approx(0.25)
    assert figures["running_mean"] == 1.5
    assert figures["host_us_per_step"] == pytest.approx(4000)
    assert figures["host_us_per_step_by_part"]["dispatch"] == pytest.approx(2000)
    assert figures["device_share"] == pytest.approx(0.9)
    assert figures["device_wait_share"] == pytest.approx(0.75)
    assert figures["itl_ms"] == pytest.approx(dict(mean=100, p50=100, p90=100, p99=100))
    # First ids come 1, 1.5, ... 5.5 s after arrival, last ones 0.9 s later.
    assert figures["ttft_ms"] == pytest.approx(dict(mean=3250, p50=3000, p90=5000, p99=5500))
    assert figures["e2e_ms"] == pytest.approx(dict(mean=4150, p50=3900, p90=5900, p99=6400))


def test_percentiles_are_values_that_occurred():
    assert distribution([]) is None
    found = distribution([i / 1000 for i in range(1, 201)])
    assert found == pytest.approx(dict(mean=100.5, p50=100, p90=180, p99=198))


# -- static batches ---------------------------------------------------------------------------


def static_engine(**options) -> StaticEngine:
    engine = fake_engine()
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=33, max_model_len=160)
    return StaticEngine(engine.config, None, runner=engine.runner, prefix_cache="off", **(sizes | options))


def test_static_batches_give_the_same_ids_and_wait_for_their_slowest_member():
    requests = prompts(8, lengths=(10, 20), outputs=(2, 40))
    engine = static_engine()
    admitted, running = [], []
    schedule = engine.scheduler.schedule

    def watched():
        step = schedule()
        if step is not None and step.admitted:
            admitted.append(len(step.admitted))
            running.append(len(engine.scheduler.running))
        return step

    engine.scheduler.schedule = watched
    trace = serve(engine, requests)
    for request, entry in zip(requests, trace.requests, strict=True):
        assert entry.outputs == [expected_output(request.prompt_token_ids, request.output_len)]
    # 33 blocks hold three reservations of 160 tokens: batches of 3, 3 and 2.
    assert admitted == running == [3, 3, 2]
    starts = [min(times[0] for times in entry.token_times) for entry in trace.requests]
    for first, second in ((range(3), range(3, 6)), (range(3, 6), range(6, 8))):
        assert max(trace.requests[i].finished for i in first) < min(starts[i] for i in second)


def test_static_batches_reserve_until_the_batch_has_ended():
    requests = [BenchRequest([5] * 10, 2), BenchRequest([6] * 10, 30), BenchRequest([7] * 10, 4)]
    trace = serve(static_engine(), requests)
    assert {sample.reserved for sample in trace.samples} == {3 * 160}
    last = trace.samples[-1]
    assert last.running <= 1 and last.used <= 40
    paged = serve(fake_engine(prefix_cache="off"), requests)
    assert summarize(trace)["kv_waste"] > 0.85 > 0.5 > summarize(paged)["kv_waste"]


def test_a_large_batch_is_filled_over_several_steps():
    requests = prompts(4, lengths=(40, 40), outputs=(5, 5))
    trace = serve(static_engine(num_kv_blocks=40), requests)
    assert summarize(trace)["running_peak"] == 4
    assert summarize(trace)["failed"] == 0


def test_reservations_are_contiguous():
    engine = static_engine()
    for request in prompts(7, outputs=(2, 30)):
        engine.add_request(request.prompt_token_ids, greedy(request), stream=False)
    seen = 0
    while engine.has_unfinished():
        engine.step()
        for request in engine.scheduler.running:
            first = request.block_ids[0]
            assert request.block_ids == list(range(first, first + 10))
            seen += 1
    assert seen


def test_memory_for_no_sequence_is_refused():
    with pytest.raises(ValueError, match="9 blocks of 16 hold no sequence of 160 tokens"):
        ReservingKVManager(9, 16, reserve=160)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random model on disk; its vocabulary is of a size that no other test has."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    config = tiny_config(num_layers=1, vocab_size=287)
    orbax.save(path, config, tiny_params(config), None)
    return str(path)


SMALL = ["--num-prompts", "5", "--input-len", "3:9", "--output-len", "2:6", "--max-num-seqs", "4"]
SMALL += ["--max-num-batched-tokens", "32"]


def run(capsys, *arguments: str) -> tuple[int, dict, str]:
    code = throughput.main([*arguments])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def test_the_command_compares_our_engines_and_compiles_nothing_while_the_clock_runs(model, capsys, tmp_path):
    picture = tmp_path / "p.png"
    engines = ["jpaged", "jpaged-no-cache", "static-contiguous"]
    arguments = [
        "--model",
        model,
        *SMALL,
        "--engines",
        ",".join(engines),
        "--repeat",
        "2",
        "--plot",
        str(picture),
    ]
    code, result, shown = run(capsys, *arguments)
    assert code == 0
    rows = result["engines"]
    assert [row["name"] for row in rows] == engines and all(name in shown for name in engines)
    assert rows[0]["ratio"] == rows[0]["ratio_low"] == rows[0]["ratio_high"] == 1
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)
    assert [row["compiles_timed"] for row in rows] == [0, 0, 0]
    assert rows[0]["warmup_compiles"] > 0 and rows[0]["warmup_s"] > 0
    assert len({row["kv_bytes"] for row in rows}) == 1
    expected = random_requests(5, (3, 9), (2, 6), seed=0, vocab_size=287)
    for found in rows:
        assert found["output_tokens"] == sum(r.output_len for r in expected)
        assert found["input_tokens"] == sum(len(r.prompt_token_ids) for r in expected)
        assert 0 <= found["device_share"] <= 1 and 0 <= found["device_wait_share"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The same in the same process again: what was compiled is still there, and no prompt is cached.
    code, again, _ = run(capsys, *arguments)
    assert code == 0 and again["engines"][0]["hit_tokens"] == rows[0]["hit_tokens"] == 0


def test_a_compilation_while_the_clock_runs_fails_the_run(model, capsys, monkeypatch):
    step = Engine.step
    sizes = iter(range(3001, 4000))

    def compiling(self):
        jax.jit(lambda x: x * 2)(jnp.zeros(next(sizes)))
        return step(self)

    monkeypatch.setattr(Engine, "step", compiling)
    code = throughput.main(["--model", model, *SMALL])
    captured = capsys.readouterr()
    assert code == 1
    assert json.loads(captured.out.splitlines()[-1])["engines"][0]["compiles_timed"] > 0
    assert "error: something compiled while the clock ran: jpaged" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "jpaged,tgi"], "tgi"),
        (["--engines", "hf:0"], "hf:0"),
        (["--engines", "jpaged,jpaged"], "named twice"),
        (["--workload", "sharegpt"], "--dataset-path"),
        (["--engines", "hf:8"], "need --baseline-model"),
        (["--repeat", "0"], "at least 1"),
        (["--request-rate", "0"], "must be above 0"),
        (["--request-rate", "nan"], "must be above 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(model, capsys, arguments, message):
    with pytest.raises(SystemExit):
        throughput.main(["--model", model, *arguments])
    assert message in capsys.readouterr().err


def test_a_preset_is_what_it_says_and_what_is_given_beside_it_holds():
    parser = throughput._parser()
    parser.set_defaults(**throughput.PRESETS["nano"])
    args = parser.parse_args(["--model", "m", "--num-prompts", "3"])
    assert (args.num_prompts, args.input_len, args.output_len, args.seed) == (3, (100, 1024), (100, 1024), 0)


@pytest.mark.parametrize(
    ("workload", "count", "longest"),
    [("random", 7, 15), ("lengths", 7, 2048), ("shared-prefix", 64, 512 + 64), ("multi-turn", 96, 480)],
)
def test_each_workload_can_be_asked_for(workload, count, longest):
    args = throughput._parser().parse_args(
        ["--model", "m", "--num-prompts", "7", *SMALL[2:6], "--workload", workload]
    )
    requests = throughput.make_requests(args, SimpleNamespace(config=tiny_config()))
    assert len(requests) == count
    assert max(full_lengths(requests)) <= longest
    assert all(3 <= token < 301 for request in requests for token in request.prompt_token_ids)


def test_sharegpt_is_read_with_the_models_own_tokenizer(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": [{"value": "question"}, {"value": "answer"}]}]))
    arguments = ["--model", "m", "--workload", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1"]
    args = throughput._parser().parse_args(arguments)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(char) for char in text])
    found = throughput.make_requests(
        args, SimpleNamespace(config=tiny_config(), load_tokenizer=lambda: tokenizer)
    )
    assert found == [BenchRequest([ord(char) for char in "question"], 6)]
    with pytest.raises(SystemExit, match="needs a model with a tokenizer"):
        throughput.make_requests(args, SimpleNamespace(config=tiny_config(), load_tokenizer=lambda: None))


PEER = """
import contextlib, sys, threading
sys.path.insert(0, {folder!r})
from peers.protocol import answer_runs, peer_parser, run_waves


@contextlib.contextmanager
def make(args):
    print("more of it")
    stopped = threading.Event()
    threading.Thread(target=stopped.wait).start()
    yield lambda requests: run_waves(
        requests, 2, lambda batch: [[r.prompt_token_ids[-1]] * (r.output_len - (r.output_len > 3))
                      for r in batch]
    )
    if {stops!r}:
        stopped.set()


answer_runs(peer_parser("A peer that repeats the last id of a prompt."), make)
"""


@pytest.mark.parametrize("stops", [True, False])
def test_a_peer_answers_in_the_same_table_with_what_it_produced(model, capsys, monkeypatch, tmp_path, stops):
    """One that stops its threads ends when no more runs come; one that does not is ended."""
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(folder=str(HF_PEER.parents[1]), stops=stops))
    (tmp_path / "config.json").write_text("{}")
    if not stops:
        monkeypatch.setattr(throughput, "PEER_EXIT_S", 0.1)
    codes, close = [], throughput.Peer.close

    def closing(self):
        close(self)
        codes.append(self._process.returncode)

    monkeypatch.setattr(throughput.Peer, "close", closing)
    monkeypatch.setattr(throughput, "peer_command", lambda name, args: [args.baseline_python, str(script)])
    arguments = ["--model", model, *SMALL, "--engines", "jpaged,hf:2", "--repeat", "3"]
    code, result, _ = run(capsys, *arguments, "--baseline-model", str(tmp_path))
    assert code == 0 and codes == [0 if stops else -signal.SIGKILL]
    ours, peer = result["engines"]
    lengths = [r.output_len for r in random_requests(5, (3, 9), (2, 6), seed=0, vocab_size=287)]
    assert ours["output_tokens"] == sum(lengths)
    assert peer["output_tokens"] == sum(n - (n > 3) for n in lengths) and peer["dtype"]
    assert math.isfinite(peer["ratio"]) and "ttft_ms" not in peer


def test_peers_hand_answers_on_to_the_next_turn():
    from peers.protocol import run_waves

    requests = multi_turn_requests(3, 2, turn_len=4, answer_len=2, seed=0, vocab_size=301)
    seen = []

    def generate(batch):
        seen.append([r.prompt_token_ids for r in batch])
        return [[r.prompt_token_ids[0], 9] for r in batch]

    inputs, outputs, _ = run_waves(requests, 2, generate)
    own = [r.prompt_token_ids for r in requests]
    assert [len(batch) for batch in seen] == [2, 1, 2, 1]
    assert seen[2] + seen[3] == [a + [a[0], 9] + b for a, b in zip(own[:3], own[3:], strict=True)]
    assert (inputs, outputs) == (3 * 4 + 3 * 10, 12)
