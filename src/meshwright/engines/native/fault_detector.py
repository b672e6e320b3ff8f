"""Detector of loss spikes and non-finite numbers.

    not finite   the loss or the gradient norm is NaN or infinite
    spike        the loss or the gradient norm is above  median + k * 1.4826 * MAD  of the last `spike_window` steps;
                 MAD is the median distance from the median, and 1.4826 MAD the standard deviation of normal numbers
                 (Rousseeuw and Croux 1993, section 1)

OLMo-core skips steps beyond six standard deviations above the mean of 128 steps. Here it is median and MAD, because
one accepted spike hardly moves them, but moves the mean and the deviation a lot.

So a run of N steps makes N updates, each with batches that no other step has read (`data_position`). Checkpoints hold
the events and the window, so a resumed run decides as an uninterrupted one.
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

NORMAL_MAD = 1.4826  # standard deviation over MAD of normal numbers


class FaultKind(StrEnum):
    """Kind of a fault."""

    NOT_FINITE = "not_finite"
    SPIKE = "spike"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One faulty step."""

    kind: FaultKind
    message: str
    loss: float
    gradient_norm: float


class FaultDetector:
    """Judges steps and records faults. All processes see the same numbers and decide alike."""

    def __init__(self, settings: Faults) -> None:
        self.settings = settings
        self.events: list[dict[str, Any]] = []
        self.recent: deque[tuple[float, float]] = deque(maxlen=settings.spike_window)

    @property
    def rolls_back(self) -> bool:
        """True if a fault may load a checkpoint."""
        return FaultAction.ROLL_BACK in (self.settings.not_finite, self.settings.spike)

    def judge(self, *, loss: float, gradient_norm: float) -> Fault | None:
        """The fault of a step with these numbers, or None."""
        numbers = {"loss": loss, "gradient norm": gradient_norm}
        for name, value in numbers.items():
            if not math.isfinite(value):
                return Fault(
                    kind=FaultKind.NOT_FINITE,
                    message=f"the {name} is {'not a number' if math.isnan(value) else 'infinite'}",
                    loss=loss,
                    gradient_norm=gradient_norm,
                )
        if self.settings.spike is FaultAction.IGNORE or len(self.recent) < self.settings.spike_window // 2:
            return None
        for (name, value), recent in zip(numbers.items(), zip(*self.recent, strict=True), strict=True):
            limit = threshold(recent, deviations=self.settings.spike_deviations)
            if limit is not None and value > limit:
                message = f"the {name} is {value:.4g}, above {limit:.4g}"
                return Fault(kind=FaultKind.SPIKE, message=message, loss=loss, gradient_norm=gradient_norm)
        return None

    def accept(self, *, loss: float, gradient_norm: float) -> None:
        """Add the numbers of a good step to the window."""
        self.recent.append((loss, gradient_norm))

    def action(self, fault: Fault) -> FaultAction:
        """The action that the settings ask for at `fault`."""
        if len(self.events) >= self.settings.max_events:
            return FaultAction.STOP
        return self.settings.not_finite if fault.kind is FaultKind.NOT_FINITE else self.settings.spike

    def note(
        self,
        fault: Fault,
        *,
        action: FaultAction,
        step: int,
        batch: int,
        skipped: tuple[int, int],
        back_to: int | None = None,
    ) -> dict[str, Any]:
        """Record `fault` at `step` and return the event.

        `batch` was the first to train the step. `skipped`: the first and the last batch that no step trains on, unless
        `action` is to stop. `back_to`: for a roll-back, the number of steps at the loaded checkpoint.
        """
        message = f"{fault.message} in step {step + 1}"
        if action is FaultAction.STOP and len(self.events) >= self.settings.max_events > 0:
            message += f", after {len(self.events)} events before it"
        event = {
            "event": len(self.events) + 1,
            "kind": fault.kind.value,
            "action": action.value,
            "words": message,
            "step": step + 1,
            "batch": batch,
            "loss": _finite(fault.loss),
            "gradient_norm": _finite(fault.gradient_norm),
            "back_to_step": back_to,
            "passed_over": None if action is FaultAction.STOP else list(skipped),
            "time": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        }
        self.events.append(event)
        return event

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint's manifest holds."""
        return {"events": list(self.events), "recent": [list(r) for r in self.recent]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.events = list(state.get("events", ()))
        self.rewind(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Return to `state`, but keep the events since then."""
        self.recent.clear()
        self.recent.extend((loss, norm) for loss, norm in state.get("recent", ()))


def threshold(values: Sequence[float], *, deviations: float) -> float | None:
    """The value above which the next one is a spike; None where all values are (nearly) the same.

    >>> threshold([1.0, 2.0, 3.0, 4.0, 100.0], deviations=6.0)
    11.8956
    """
    median = statistics.median(values)
    mad = statistics.median(abs(v - median) for v in values)
    return median + deviations * NORMAL_MAD * mad if mad > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers
