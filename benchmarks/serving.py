"""Drives an engine with a workload and says what came of it, from the ids that were really produced.

`serve` keeps times and counts of one run (a `Trace`), `summarize` turns a trace into figures. Nothing here
knows what kind of engine it is: ours, or ours with memory reserved ahead (`static_batches`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from workloads import BenchRequest

from jpaged import Engine, SamplingParams
from jpaged.engine.metrics import compilations

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class RequestTrace:
    """One request. Times are seconds since the run began.

    Attributes:
      arrival: when it was due, which may be before it could be taken in.
      token_times: of each of its sequences, when each of its ids was known on the host.
      outputs: ids of each of its sequences; empty if it failed.
    """

    input_tokens: int
    arrival: float
    token_times: list[list[float]] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    finished: float = math.nan
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


@dataclasses.dataclass(frozen=True)
class Sample:
    """After a step: running sequences; slots of KV memory that are reserved, and that hold a token."""

    time: float
    running: int
    reserved: int
    used: int


@dataclasses.dataclass
class Trace:
    """One run."""

    requests: list[RequestTrace]
    elapsed: float = 0.0
    samples: list[Sample] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the engine
    compiles: int = 0


def greedy(request: BenchRequest, *, ignore_eos: bool = True) -> SamplingParams:
    """The most probable ids, as many as the request wants."""
    return SamplingParams(temperature=0, ignore_eos=ignore_eos, max_tokens=request.output_len)


def serve(
    engine: Engine,
    requests: Sequence[BenchRequest],
    params: Callable[[BenchRequest], SamplingParams] = greedy,
    arrivals: Sequence[float] | None = None,
) -> Trace:
    """Runs a workload from an empty prefix cache to its last id.

    Args:
      params: how to sample a request.
      arrivals: seconds at which requests arrive, in their order; `None`: all of them at once, and texts are
        made when a request has finished, not as they grow. A request `after` another one arrives when that
        one has finished, whatever is said here.
    """
    return _Run(engine, requests, params, arrivals).trace


class _Run:
    def __init__(
        self,
        engine: Engine,
        requests: Sequence[BenchRequest],
        params: Callable[[BenchRequest], SamplingParams],
        arrivals: Sequence[float] | None,
    ):
        self._engine, self._requests, self._params = engine, requests, params
        self._stream = arrivals is not None
        self._followers: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(index)
        first = [i for i, request in enumerate(requests) if request.after is None]
        self._due = [(arrivals[i] if arrivals else 0.0, i) for i in first][::-1]  # the next one is last
        self._index: dict[str, int] = {}  # by the engine's id
        self._times: dict[tuple[str, int], list[float]] = {}  # by the engine's id and completion
        self.trace = Trace([RequestTrace(len(r.prompt_token_ids), 0.0) for r in requests])
        engine.step()  # takes in what an earlier run left on the device
        engine.reset_prefix_cache()
        engine.reset_stats()
        compiled = compilations.count
        self._started = time.perf_counter()
        self._loop()
        self.trace.elapsed = self._now()
        self.trace.compiles = compilations.count - compiled
        self.trace.stats = engine.stats()

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _loop(self) -> None:
        slots = (0, 0)
        while self._due or self._engine.has_unfinished():
            while self._due and self._due[-1][0] <= self._now():
                arrival, index = self._due.pop()
                self._add(index, arrival, self._requests[index].prompt_token_ids)
            if not self._engine.has_unfinished():
                if self._due:
                    time.sleep(max(0.0, self._due[-1][0] - self._now()))
                continue
            finished = [output for output in self._engine.step() if output.finished]
            now = self._now()
            scheduler = self._engine.scheduler
            for request in scheduler.requests():
                times = self._times.setdefault((request.parent_id, request.index), [])
                times.extend([now] * (request.num_output_tokens - len(times)))
            for output in finished:
                self._finish(output, now)
            total = scheduler.stats.slots_allocated, scheduler.stats.slots_filled
            if total != slots:
                reserved, used = total[0] - slots[0], total[1] - slots[1]
                self.trace.samples.append(Sample(now, len(scheduler.running), reserved, used))
            slots = total

    def _add(self, index: int, arrival: float, prompt: list[int]) -> None:
        entry = self.trace.requests[index]
        entry.arrival, entry.input_tokens = arrival, len(prompt)
        try:
            request_id = self._engine.add_request(
                prompt, self._params(self._requests[index]), stream=self._stream
            )
        except ValueError as error:
            self._fail(index, str(error))
            return
        self._index[request_id] = index

    def _finish(self, output: Any, now: float) -> None:
        index = self._index.pop(output.request_id)
        if output.error is not None:
            self._fail(index, output.error)
            return
        entry = self.trace.requests[index]
        entry.finished = now
        for completion in output.outputs:
            times = self._times.pop((output.request_id, completion.index), [])
            times.extend([now] * (len(completion.token_ids) - len(times)))
            entry.token_times.append(times)
            entry.outputs.append(completion.token_ids)
        history = output.prompt_token_ids + output.outputs[0].token_ids
        for follower in self._followers.get(index, ()):
            self._add(follower, now, history + self._requests[follower].prompt_token_ids)

    def _fail(self, index: int, error: str) -> None:
        """A request that failed; what was to follow it fails with it."""
        self.trace.requests[index].error = error
        for follower in self._followers.get(index, ()):
            self._fail(follower, f"the turn before failed: {error}")


def summarize(trace: Trace) -> dict[str, Any]:
    """Figures of a run. Tokens are those of requests that succeeded, each counted once.

    `input` counts prompt tokens, of which `hit_tokens` were found in the prefix cache and not computed;
    `total` is input and output. Rates are over the whole run. Latencies are in milliseconds: `ttft` from
    arrival to a request's first id, `itl` between two ids of a sequence, `e2e` from arrival to the last id.
    """
    done = [request for request in trace.requests if request.error is None]
    inputs, outputs = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    gaps = [b - a for r in done for times in r.token_times for a, b in zip(times, times[1:], strict=False)]
    firsts = [min(t[0] for t in r.token_times if t) - r.arrival for r in done if r.output_tokens]
    stats, elapsed = trace.stats, trace.elapsed
    steps = max(1, stats["num_steps"])
    host = stats["host_seconds"]
    reserved, used = sum(s.reserved for s in trace.samples), sum(s.used for s in trace.samples)
    return {
        "requests": len(trace.requests),
        "failed": len(trace.requests) - len(done),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "elapsed_s": elapsed,
        **rates(inputs, outputs, elapsed),
        "ttft_ms": distribution(firsts),
        "itl_ms": distribution(gaps),
        "e2e_ms": distribution([r.finished - r.arrival for r in done]),
        "running_mean": statistics.fmean(s.running for s in trace.samples) if trace.samples else 0.0,
        "running_peak": stats["num_requests_running_peak"],
        "kv_waste": 1 - used / reserved if reserved else 0.0,
        "hit_tokens": stats["prefix_cache_hits"],
        "preemptions": stats["num_preemptions"],
        "steps": stats["num_steps"],
        "scheduled_tokens": stats["num_scheduled_tokens"],
        "host_us_per_step": sum(host.values()) / steps * 1e6,
        "host_us_per_step_by_part": {part: seconds / steps * 1e6 for part, seconds in host.items()},
        "device_wait_share": stats["device_wait_seconds"] / elapsed,
        "device_share": stats["device_busy_seconds"] / elapsed,
        "compiles_timed": trace.compiles,
    }


def rates(input_tokens: int, output_tokens: int, seconds: float) -> dict[str, float]:
    """Tokens per second over a run."""
    return {
        "input_tokens_per_s": input_tokens / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (input_tokens + output_tokens) / seconds,
    }


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; a percentile is the smallest value that so many do not exceed."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {"mean": statistics.fmean(ordered) * 1e3}
    for percent in PERCENTILES:
        found[f"p{percent}"] = ordered[math.ceil(len(ordered) * percent / 100) - 1] * 1e3
    return found
