"""Rejections by the memory model: configurations that ran out of memory, and runs that worked.

A configuration that ran out of memory should be rejected; a measured run should not be. Both shares are given, because
rejecting everything would get the first one right.

A run that worked can be rejected because its source does not state recomputation or offloading, which change memory by
factors. Such runs are therefore also counted separately.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.recomputation import NO_RECOMPUTATION
from meshwright.accuracy.rows import PublishedRun
from meshwright.json_values import picked

UNSTATED = (NO_RECOMPUTATION, "recomputation '", "offloading of activations")
"""Prefixes of the notes on assumptions that decide a row's memory."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Numbers of failed configurations and of runs that worked, and of the rejected ones among them."""

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
    """Shares over all rows, over parts of them, and by source, and the excluded rows by reason.

    `stated` and `unstated` split `total` by `states_memory`; `same_sources` are the sources that list failures.
    """

    total: Shares
    stated: Shares
    unstated: Shares
    same_sources: Shares
    by_source: dict[str, Shares]
    excluded: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {**self.total.as_json(), **picked(self, "stated", "unstated", "same_sources", "by_source", "excluded")}


def states_memory(run: PublishedRun) -> bool:
    """True if the source of `run` states recomputation and offloading in terms that the model has."""
    return not any(note.startswith(UNSTATED) for note in run.assumed)


def judge(
    failed: Sequence[PublishedRun],
    failed_predictions: Predictions,
    worked: Sequence[PublishedRun],
    worked_predictions: Predictions,
    *,
    excluded: Counter[str],
) -> FailedReport:
    """Shares of failed configurations that are not said to fit, and of measured runs that are said not to.

    A verdict between the two, that a run may fit, counts against neither.
    `failed` and `worked` have conditions; `excluded` counts the other failed rows by reason.
    """
    counts: dict[tuple[str, bool], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for offset, runs, rejected in ((0, failed, ~failed_predictions.fits), (2, worked, worked_predictions.refused)):
        for run, is_rejected in zip(runs, rejected, strict=True):
            count = counts[run.source_key, states_memory(run)]
            count[offset] += 1
            count[offset + 1] += bool(is_rejected)
    sources = sorted({source for (source, _), c in counts.items() if c[0]})
    by_source = {name: _sum(c for (source, _), c in counts.items() if source == name) for name in sources}
    return FailedReport(
        total=_sum(counts.values()),
        stated=_sum(c for (_, stated), c in counts.items() if stated),
        unstated=_sum(c for (_, stated), c in counts.items() if not stated),
        same_sources=_sum(c for (source, _), c in counts.items() if source in by_source),
        by_source=by_source,
        excluded=dict(excluded.most_common()),
    )


def _sum(counts: Iterable[list[int]]) -> Shares:
    failed, failed_rejected, worked, worked_rejected = np.sum([[0] * 4, *counts], axis=0).tolist()
    return Shares(
        num_failed=failed, num_failed_rejected=failed_rejected, num_worked=worked, num_worked_rejected=worked_rejected
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
