"""Like for like: the gap between two sides, split into kernel, communication, bubble and host time.

gap = time per token and device of the side - time of the baseline = sum of the four parts' differences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from meshwright.answers.comparison.sides import Breakdown, Side

PARTS = {
    "kernel_s": "kernels", "communication_s": "exposed communication", "bubble_s": "pipeline bubble",
    "host_s": "host and other waiting",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Time per token of two sides on one workload. Seconds of one device."""

    workload: str
    baseline: str
    other: str
    before: Breakdown
    after: Breakdown

    @property
    def total_s(self) -> float:
        """Positive where the other side is slower."""
        return self.after.total_s - self.before.total_s

    def part_s(self, part: str) -> float:
        """Difference of one part of `PARTS`."""
        return getattr(self.after, part) - getattr(self.before, part)


def gaps(baseline: Side, other: Side) -> list[Gap]:
    """The gap on each workload for which both sides have a breakdown."""
    assert {f.name for f in fields(Breakdown)} == {*PARTS, "note"}
    return [
        Gap(
            workload=workload, baseline=baseline.name, other=other.name, before=before,
            after=other.breakdowns[workload],
        )
        for workload, before in baseline.breakdowns.items()
        if workload in other.breakdowns
    ]  # fmt: skip


def reasons_not_split(baseline: Side, others: Sequence[Side]) -> list[str]:
    """Reason for each gap that is not split although one of its sides could be, or both are trainings."""
    found = []
    for side in (baseline, *others):
        partners = others if side is baseline else [baseline]
        wanted = any(p.breakdowns or p.not_split for p in partners)
        if side.not_split and wanted:
            found.append(f"the gap of {side.name} is not split into kernels and waiting: {side.not_split}")
    return found
