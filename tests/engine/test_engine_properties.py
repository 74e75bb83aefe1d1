"""Any sequence of requests, steps, aborts, preemptions, forks and evictions gives the right tokens.

The fake device keeps the tokens that were written into each slot and samples from what it reads back
through the block tables, so a block that is shared, freed, copied or evicted wrongly changes an output.
JPAGED_PROPERTY_STEPS sets the number of operations (10,000 by default).
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from fake import FakeRunner, drain, expected_output, fake_engine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jpaged import SamplingParams
from jpaged.request import Request
from jpaged.scheduling.kv_manager import KVManager
from jpaged.scheduling.scheduler import Scheduler

STEPS = int(os.environ.get("JPAGED_PROPERTY_STEPS", "10000"))
PER_RUN = 50


class EngineMachine(RuleBasedStateMachine):
    """An engine on a small pool, against what each prompt gives alone."""

    @initialize(
        kind=st.sampled_from(["radix", "radix", "hash", "off"]),
        overlap=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm", "dfs"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        blocks=st.integers(8, 24),
        chunk=st.sampled_from([4, 9, 32]),
    )
    def start(self, kind, overlap, policy, eviction, blocks, chunk):
        self.engine = fake_engine(
            prefix_cache=kind,
            overlap=overlap,
            schedule_policy=policy,
            eviction_policy=eviction,
            num_kv_blocks=blocks,
            block_size=4,
            max_num_batched_tokens=chunk,
        )
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict = {}
        self.failures = 0

    @rule(stem=st.integers(0, 2), cut=st.integers(0, 14), tail=st.integers(0, 5), count=st.integers(1, 12))
    def add(self, stem, cut, tail, count):
        prompt = [*range(10 + 40 * stem, 10 + 40 * stem + cut), *range(200, 200 + tail)] or [5]
        salt = "tenant" if stem == 2 and tail == 5 else None
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        name = self.engine.add_request(prompt, params, cache_salt=salt)
        self.prompts[name] = prompt

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.outputs |= {output.request_id: output for output in self.engine.step()}
            self.engine.scheduler.check_invariants()

    @rule(data=st.data())
    def abort(self, data):
        if self.engine._groups:
            self.engine.abort(data.draw(st.sampled_from(sorted(self.engine._groups))))

    @rule(data=st.data())
    def preempt(self, data):
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.preempt(data.draw(st.sampled_from(running)))

    @rule(data=st.data(), count=st.integers(1, 2))
    def fork(self, data, count):
        names = sorted(name for name, group in self.engine._groups.items() if not group.finished)
        if names and len(names) < 12:
            name = data.draw(st.sampled_from(names))
            for branch in self.engine.fork(name, count):
                self.prompts[branch] = self.prompts[name]

    @rule()
    def forget_prefixes(self):
        self.engine.reset_prefix_cache()

    @rule()
    def fail(self):
        if self.engine.scheduler.has_unfinished:
            self.engine.runner.fail_at = 0
            try:
                self.outputs |= {output.request_id: output for output in self.engine.step()}
            except RuntimeError:
                self.failures += 1
            self.engine.runner.fail_at = None

    @invariant()
    def blocks_and_rows_agree(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.outputs |= drain(self.engine)
        assert self.engine.runner.resets == self.failures
        for name, prompt in self.prompts.items():
            completion = self.outputs[name].outputs[0]
            assert completion.token_ids == expected_output(prompt, len(completion.token_ids)), name
        assert self.engine.stats()["kv_blocks_active"] == 0
        self.engine.reset_prefix_cache()
        assert self.engine.stats()["kv_blocks_free"] == self.engine.stats()["kv_blocks_total"]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=STEPS // PER_RUN,
    stateful_step_count=PER_RUN,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_unique_requests_leave_the_number_of_nodes_bounded_by_the_pool(kind):
    """Host memory is bounded by the pool, however many requests there were."""
    engine = fake_engine(prefix_cache=kind, num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for number in range(2000):
        prompt = [3 + number % 290, 3 + number // 290, *range(5, 35)]
        engine.add_request(prompt, params, stream=False)
        engine.runner.steps.clear()
        engine.step()
    drain(engine)
    cache = engine.scheduler.kv.cache
    assert cache.num_cached <= 64 and len(cache._node_of) == cache.num_cached and len(cache._queue) <= 64
    assert not engine._groups and not engine._sequences and not engine.scheduler._awaited
    assert not engine.scheduler.kv._copies and not engine.scheduler.waiting._since


STATM = Path("/proc/self/statm")
TOLERANCE = 3 * 2**20  # bytes; one small object kept per request would be several times as much


def resident_memory() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_nodes(snapshot: list[dict]) -> int:
    """Nodes of a prefix cache, roots included."""
    stack, count = list(snapshot), 0
    while stack:
        count += 1
        stack += stack.pop()["children"]
    return count


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("kind", "total"), [("radix", 200_000), ("hash", 50_000)])
def test_unique_requests_leave_nodes_and_resident_memory_flat(kind, total):
    """Nine tenths of the requests add nothing to what the first tenth took."""
    kv = KVManager(64, 4, prefix_cache=kind)
    scheduler = Scheduler(kv, max_num_seqs=16, max_num_batched_tokens=128)
    runner, params = FakeRunner(block_size=4), SamplingParams(temperature=0, ignore_eos=True)

    def serve(start, stop):
        for number in range(start, stop):
            prompt = [3 + number // 78_400, 3 + number // 280 % 280, 3 + number % 280, 4, 5, 6]
            salt = f"tenant{number}" if number % 10 == 0 else None
            scheduler.add(
                Request(f"r{number}", prompt, params, arrival=number, max_total_tokens=8, cache_salt=salt)
            )
            if len(scheduler.waiting) == 16 or number == stop - 1:
                while scheduler.has_unfinished:
                    step = scheduler.schedule()
                    scheduler.update(step, runner.run(step).result().tokens, {})
                    runner.steps.clear()
        scheduler.check_invariants()
        return count_nodes(kv.cache.snapshot()), len(kv.cache._queue), resident_memory()

    nodes, queued, memory = serve(0, total // 10)
    nodes_later, queued_later, memory_later = serve(total // 10, total)
    assert nodes_later <= nodes + 8 and nodes <= 2 * 64  # a block has at most one node and one root
    assert queued <= 64 and queued_later <= 64
    assert memory_later <= memory + TOLERANCE
    assert kv.cache.num_evicted > total / 2
