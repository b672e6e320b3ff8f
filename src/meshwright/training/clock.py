"""Wall time of a training by phase. Every second belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class TrainingPhase(StrEnum):
    """A phase of a training."""

    START_UP = "start_up"  # from the command to the first step: imports, data, model, resume
    WARM_UP = "warm_up"  # the first steps, which compile, pick kernels and fill caches
    TRAINING = "training"
    PROFILING = "profiling"  # steps under the profiler, which slows them, and the writing of the trace
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"  # waits of the loop, not writes in the background
    CLOSING = "closing"  # the text sample, and other work after the last step


class Clock:
    """Adds up seconds by phase, from `started_s` (Unix time) on, when the command began."""

    def __init__(self, *, started_s: float) -> None:
        self.started_s = started_s
        self.phase = TrainingPhase.START_UP
        self._seconds = dict.fromkeys(TrainingPhase, 0.0)
        # Unix time may be set during a run, so it counts only up to here.
        self._seconds[TrainingPhase.START_UP] = max(0.0, time.time() - started_s)
        self._since_s = time.perf_counter()

    def enter(self, phase: TrainingPhase) -> None:
        """Count seconds from now on as `phase`."""
        now_s = time.perf_counter()
        self._seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    @contextmanager
    def during(self, phase: TrainingPhase) -> Iterator[None]:
        """Count seconds as `phase` while the context is open, then as the phase before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, and `total`, which is their sum."""
        self.enter(self.phase)
        parts = {phase.value: seconds for phase, seconds in self._seconds.items()}
        return parts | {"total": sum(parts.values())}
