"""Where a step's time goes, as far as the host can tell."""

from __future__ import annotations

import time

import pytest
from fake import FakeHandle, drain, fake_engine

from jpaged import SamplingParams
from jpaged.engine.metrics import StepTimes, since_process_start


def times_at(moment: float) -> StepTimes:
    times = StepTimes()
    times._busy_until = moment
    return times


def test_a_device_that_is_always_ahead_of_the_host_is_busy_all_the_time():
    """1 goes out at 10, 2 at 11 while 1 runs; 1 is waited for until 14; 3 goes out at 15; 2 ends at 18."""
    times = times_at(0.0)
    times.dispatched(10.0, busy=False)
    times.dispatched(11.0, busy=True)
    times.waited(14.0)
    times.dispatched(15.0, busy=True)
    times.waited(18.0)
    assert times.device_busy == 8.0


def test_what_is_not_known_to_be_busy_is_not_counted():
    """Step 1 ends somewhere between 10 and 13: nothing of that is counted, nor the gap after it."""
    times = times_at(0.0)
    times.dispatched(10.0, busy=False)
    times.dispatched(13.0, busy=False)
    times.waited(15.0)
    assert times.device_busy == 2.0


class SlowHandle(FakeHandle):
    """A step that takes ten milliseconds from the moment somebody waits for it."""

    def ready(self) -> bool:
        return False

    def result(self):
        time.sleep(0.01)
        return super().result()


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_is_the_devices_time_and_not_the_hosts(overlap):
    engine = fake_engine(overlap=overlap)
    run = engine.runner.run
    engine.runner.run = lambda step: SlowHandle(run(step).outcome)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    started = time.perf_counter()
    drain(engine, check=False)
    elapsed = time.perf_counter() - started
    stats = engine.stats()
    assert stats["num_steps"] == 4
    assert stats["host_seconds"].keys() == {"schedule", "dispatch", "update", "outputs"}
    assert all(seconds > 0 for seconds in stats["host_seconds"].values())
    assert 0.04 <= stats["device_wait_seconds"] <= stats["device_busy_seconds"] <= elapsed
    assert sum(stats["host_seconds"].values()) + stats["device_wait_seconds"] <= elapsed
    engine.reset_stats()
    assert engine.stats()["device_wait_seconds"] == engine.stats()["device_busy_seconds"] == 0
    assert engine.stats()["first_token_time"] is None


def test_the_first_token_of_all_requests_has_a_time():
    engine = fake_engine()
    assert engine.stats()["first_token_time"] is None
    before = time.monotonic()
    for prompt in ([5, 6], [7]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    outputs = drain(engine)
    first = engine.stats()["first_token_time"]
    assert before <= first == min(output.metrics.first_token_time for output in outputs.values())


def test_the_age_of_the_process_grows_with_time():
    now = time.monotonic()
    age = since_process_start(now)
    assert age is not None and 0 < age < 100_000
    assert since_process_start(now + 5) == pytest.approx(age + 5, abs=0.5)
