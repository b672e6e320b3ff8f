"""Where the wall time of a training goes: every second belongs to exactly one phase, so that phases add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class TrainingPhase(StrEnum):
    """What a training is doing."""

    START_UP = (
        "start_up"  # from the command to the first step: imports, data, model, checkpoint to resume from
    )
    WARM_UP = "warm_up"  # the first steps, which compile, pick kernels and fill caches
    TRAINING = "training"
    PROFILING = "profiling"  # steps under the profiler, which slows them, and the writing of the trace
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"  # what the loop waits for
    CLOSING = "closing"  # the text sample, and what is left after the last step


class Clock:
    """Adds up seconds by phase, from `started_s` (Unix time) on, when the command began."""

    def __init__(self, *, started_s: float) -> None:
        self.started_s = started_s
        self.phase = TrainingPhase.START_UP
        self._seconds = dict.fromkeys(TrainingPhase, 0.0)
        # Unix time may be set while a run lasts, so that it only counts up to here.
        self._seconds[TrainingPhase.START_UP] = max(0.0, time.time() - started_s)
        self._since_s = time.perf_counter()

    def enter(self, phase: TrainingPhase) -> None:
        """From now on seconds belong to `phase`."""
        now_s = time.perf_counter()
        self._seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    @contextmanager
    def during(self, phase: TrainingPhase) -> Iterator[None]:
        """Seconds belong to `phase` while the context is open, then again to what was before."""
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
