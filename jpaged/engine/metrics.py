"""Counting compilations, so that "nothing compiles after warm-up" is a number and not a hope."""

from __future__ import annotations

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
