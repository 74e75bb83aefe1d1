"""Counts of compilations, so that "nothing compiles after warm-up" is a number; parts of a step's time."""

from __future__ import annotations

import dataclasses
import os
import time

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Compilations:
    """Programs compiled in this process and the seconds that took."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs


compilations = _Compilations()


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Seconds since counting began, by part of a step, and what is known of the device's.

    The host's parts are `schedule`, `dispatch` (packing and handing over; a device without a queue
    computes here), `update` and `outputs` (detokenizing, reporting). `wait` is the time that
    the host waits for a step's ids.

    `device_busy` is what can be told without a profiler, and never too much: from a step's dispatch on,
    up to the last moment at which it was seen unfinished or waited for. A step that follows one
    which was unfinished when it was dispatched leaves no gap.
    """

    schedule: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    outputs: float = 0.0
    device_busy: float = 0.0
    first_token: float | None = None  # moment of `time.monotonic()`
    _busy_until: float = dataclasses.field(default_factory=time.perf_counter)

    def dispatched(self, now: float, *, busy: bool) -> None:
        """A step was dispatched; `busy` if the one before it was still unfinished after that."""
        if busy:
            self.device_busy += now - self._busy_until
        self._busy_until = now

    def waited(self, now: float) -> None:
        """A step that was unfinished when the host began to wait for it has finished."""
        self.device_busy += now - self._busy_until
        self._busy_until = now

    @property
    def host(self) -> dict[str, float]:
        """Seconds of the host's own parts."""
        return {
            "schedule": self.schedule,
            "dispatch": self.dispatch,
            "update": self.update,
            "outputs": self.outputs,
        }


def since_process_start(moment: float) -> float | None:
    """Seconds from the start of this process, interpreter and imports included, to a `time.monotonic()`.

    `None` where there is no /proc to tell.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return age - (time.monotonic() - moment)
