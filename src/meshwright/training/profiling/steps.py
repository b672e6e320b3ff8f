"""Profiled steps of a training, and how processes of other programs learn of them. Imports no tensor framework."""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "MESHWRIGHT_PROFILE"
"""Environment variable of a process that is to profile steps: FIRST:LAST."""
FOLDER, TRACE, SUMMARY = "profile", "trace-rank0.json.gz", "summary.json"
STEPS_BEFORE, NUM_STEPS = 5, 3


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """The profiled steps, counted from 1, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> ProfileSteps:
        """Return the steps of FIRST:LAST. Raises ValueError for another text.

        >>> ProfileSteps.parse("6:8")
        ProfileSteps(first=6, last=8)
        """
        first, _, last = text.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(f"no range of steps: {text!r}")
        return cls(first=int(first), last=int(last))

    def covers(self, step: int) -> bool:
        """Return True if `step` runs under the profiler: also the step before the first one, which does not count."""
        return self.first - 1 <= step <= self.last


def steps_to_profile(asked: ProfileSteps | None, *, done: int, num_steps: int) -> ProfileSteps | None:
    """`asked`, or `NUM_STEPS` steps after the warm-up, or the last ones of a shorter run.

    None: the resumed run is past the first of the `asked` steps.
    """
    if asked is not None:
        return asked if asked.first > done else None
    last = min(num_steps, done + STEPS_BEFORE + NUM_STEPS)
    return ProfileSteps(first=max(done + 1, last - NUM_STEPS + 1), last=last)


def steps_of_environment() -> ProfileSteps | None:
    """Return the steps that this process is to profile; None: it profiles none. Raises ValueError for another text."""
    text = os.environ.get(VARIABLE)
    return ProfileSteps.parse(text) if text else None
