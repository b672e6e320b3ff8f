"""Does the memory model tell plans that run from plans that do not?

A configuration that ran out of memory should be rejected; a run that was measured should not be. Both shares
are given, because either is easy alone: rejecting everything gets the first one right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.rows import PublishedRun


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How many configurations failed, how many runs worked, and how many of each were rejected."""

    num_failed: int
    num_failed_rejected: int
    num_worked: int
    num_worked_rejected: int

    @property
    def correctly_rejected_ratio(self) -> float:
        return _ratio(self.num_failed_rejected, self.num_failed)

    @property
    def wrongly_rejected_ratio(self) -> float:
        return _ratio(self.num_worked_rejected, self.num_worked)

    def as_json(self) -> dict[str, float]:
        return {
            "num_failed": self.num_failed,
            "num_worked": self.num_worked,
            "correctly_rejected_ratio": self.correctly_rejected_ratio,
            "wrongly_rejected_ratio": self.wrongly_rejected_ratio,
        }


@dataclass(frozen=True, kw_only=True)
class FailedReport:
    """Shares over all rows, over the sources that list failures, and by source; what was left out and why."""

    total: Shares
    same_sources: Shares
    by_source: dict[str, Shares]
    excluded: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.total.as_json(),
            "same_sources": self.same_sources,
            "by_source": self.by_source,
            "excluded": self.excluded,
        }


def judge(
    failed: Sequence[PublishedRun],
    failed_predictions: Predictions,
    worked: Sequence[PublishedRun],
    worked_predictions: Predictions,
    *,
    excluded: Counter[str],
) -> FailedReport:
    """Shares of failed configurations and of measured runs that the memory model rejects.

    `failed` and `worked` have conditions; `excluded` counts the other failed rows by reason.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for offset, runs, predictions in ((0, failed, failed_predictions), (2, worked, worked_predictions)):
        for run, fits in zip(runs, predictions.fits, strict=True):
            counts[run.source_key][offset] += 1
            counts[run.source_key][offset + 1] += not fits
    listed = {source: c for source, c in counts.items() if c[0]}
    return FailedReport(
        total=_sum(counts.values()),
        same_sources=_sum(listed.values()),
        by_source={source: _sum([c]) for source, c in sorted(listed.items())},
        excluded=dict(excluded.most_common()),
    )


def _sum(counts: Iterable[list[int]]) -> Shares:
    failed, failed_rejected, worked, worked_rejected = np.sum([[0] * 4, *counts], axis=0).tolist()
    return Shares(
        num_failed=failed,
        num_failed_rejected=failed_rejected,
        num_worked=worked,
        num_worked_rejected=worked_rejected,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
