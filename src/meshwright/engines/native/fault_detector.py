"""Steps whose numbers cannot be right: how they are recognised, and what is done about them.

    not finite   the loss or the gradient norm is no number, or infinite
    spike        the loss or the gradient norm is above  median + k * 1.4826 * MAD  of the last `spike_window` steps;
                 MAD is the median distance from the median, and 1.4826 MAD the standard deviation of normal numbers
                 (Rousseeuw and Croux 1993, section 1)

OLMo-core skips steps beyond six standard deviations above the mean of 128 steps. Median and MAD are used here because
one spike that was let through moves them hardly, and the mean and the deviation a lot.

    stop         the run ends
    skip         the update is not applied and the batch is passed over; the next batch trains the same step
    roll back    the newest good checkpoint is loaded, and all batches since then are passed over, the bad one included
                 (PaLM, Chowdhery et al. 2022, section 5.1: the same batches did no harm to other weights)

So a run of N steps makes N updates. Batch numbers are a pure function of the step and of what was passed over:

    batch of step s = the s-th number, from 0, that was not passed over

Checkpoints hold what was passed over, the events and the window, so a resumed run judges as the first one would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from meshwright.specs.run import FaultAction, Faults

Ranges = tuple[tuple[int, int], ...]
"""Batches that were passed over, as (first, last), in order, with others between them."""

NORMAL_MAD = 1.4826  # standard deviation over MAD of normal numbers


class FaultKind(StrEnum):
    """What cannot be right."""

    NOT_FINITE = "not_finite"
    SPIKE = "spike"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One step that cannot be right."""

    kind: FaultKind
    words: str
    loss: float
    gradient_norm: float


class FaultDetector:
    """Judges steps and keeps account of what was passed over. All processes see the same numbers and decide alike."""

    def __init__(self, settings: Faults) -> None:
        self.settings = settings
        self.skipped: Ranges = ()
        self.events: list[dict[str, Any]] = []
        self.recent: deque[tuple[float, float]] = deque(maxlen=settings.spike_window)

    @property
    def rolls_back(self) -> bool:
        """Whether a fault may ask for a checkpoint."""
        return FaultAction.ROLL_BACK in (self.settings.not_finite, self.settings.spike)

    def batch_of(self, step: int) -> int:
        """The batch that trains `step`, both counted from 0."""
        return batch_of(step, skipped=self.skipped)

    def judge(self, *, loss: float, gradient_norm: float) -> Fault | None:
        """What is wrong with a step of these numbers, or None."""
        numbers = {"loss": loss, "gradient norm": gradient_norm}
        for name, value in numbers.items():
            if not math.isfinite(value):
                words = f"the {name} is {'not a number' if math.isnan(value) else 'infinite'}"
                return Fault(kind=FaultKind.NOT_FINITE, words=words, loss=loss, gradient_norm=gradient_norm)
        if self.settings.spike is FaultAction.IGNORE or len(self.recent) < self.settings.spike_window // 2:
            return None
        for (name, value), recent in zip(numbers.items(), zip(*self.recent, strict=True), strict=True):
            limit = threshold(recent, deviations=self.settings.spike_deviations)
            if limit is not None and value > limit:
                words = f"the {name} is {value:.4g}, above {limit:.4g}"
                return Fault(kind=FaultKind.SPIKE, words=words, loss=loss, gradient_norm=gradient_norm)
        return None

    def accept(self, *, loss: float, gradient_norm: float) -> None:
        """Note the numbers of a step that was taken."""
        self.recent.append((loss, gradient_norm))

    def action(self, fault: Fault) -> FaultAction:
        """What to do about `fault`."""
        if len(self.events) >= self.settings.max_events:
            return FaultAction.STOP
        return self.settings.not_finite if fault.kind is FaultKind.NOT_FINITE else self.settings.spike

    def note(
        self, fault: Fault, *, action: FaultAction, step: int, batch: int, back_to: int | None = None
    ) -> dict[str, Any]:
        """The event of `fault` at `step`, which `batch` was to train; passes over what `action` says.

        `back_to`: steps taken at the checkpoint that was loaded, for a roll-back.
        """
        words = f"{fault.words} in step {step + 1}"
        if action is FaultAction.STOP and len(self.events) >= self.settings.max_events > 0:
            words += f", after {len(self.events)} events before it"
        first = batch if back_to is None else self.batch_of(back_to)
        if action is not FaultAction.STOP:
            self.skipped = passed_over(self.skipped, first=first, last=batch)
        event = {
            "event": len(self.events) + 1,
            "kind": fault.kind.value,
            "action": action.value,
            "words": words,
            "step": step + 1,
            "batch": batch,
            "loss": _finite(fault.loss),
            "gradient_norm": _finite(fault.gradient_norm),
            "back_to_step": back_to,
            "passed_over": None if action is FaultAction.STOP else [first, batch],
            "time": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        }
        self.events.append(event)
        return event

    def state(self) -> dict[str, Any]:
        """What a checkpoint's manifest holds of it."""
        return {
            "skipped": [list(r) for r in self.skipped],
            "events": list(self.events),
            "recent": [list(r) for r in self.recent],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.events = list(state.get("events", ()))
        self.rewind(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` was taken, and remember the events since then."""
        self.skipped = tuple((first, last) for first, last in state.get("skipped", ()))
        self.recent.clear()
        self.recent.extend((loss, norm) for loss, norm in state.get("recent", ()))


def batch_of(step: int, *, skipped: Ranges) -> int:
    """The `step`-th number, from 0, that is in none of the ranges.

    >>> [batch_of(step, skipped=((2, 3), (6, 6))) for step in range(6)]
    [0, 1, 4, 5, 7, 8]
    """
    batch = step
    for first, last in skipped:
        if first > batch:
            break
        batch += last - first + 1
    return batch


def passed_over(skipped: Ranges, *, first: int, last: int) -> Ranges:
    """`skipped` with all of `first` to `last`; ranges that meet become one.

    >>> passed_over(((2, 3), (6, 6)), first=4, last=4)
    ((2, 4), (6, 6))
    >>> passed_over(((2, 3), (6, 6)), first=4, last=9)
    ((2, 9),)
    """
    apart = [r for r in skipped if r[1] < first - 1 or r[0] > last + 1]
    touched = [r for r in skipped if r not in apart]
    joined = (min([first, *(r[0] for r in touched)]), max([last, *(r[1] for r in touched)]))
    return tuple(sorted([*apart, joined]))


def threshold(values: Sequence[float], *, deviations: float) -> float | None:
    """Above it a value is a spike; None where all values are (nearly) the same.

    >>> threshold([1.0, 2.0, 3.0, 4.0, 100.0], deviations=6.0)
    11.8956
    """
    median = statistics.median(values)
    mad = statistics.median(abs(v - median) for v in values)
    return median + deviations * NORMAL_MAD * mad if mad > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers
