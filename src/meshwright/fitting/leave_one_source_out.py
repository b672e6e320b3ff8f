"""Leave-one-source-out: each published source predicted by a calibration fitted to all other sources.

This is the error to expect on an unseen cluster and software. The error on fitted rows is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.predict import predict, predict_steps
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import tables_of
from meshwright.calibration.parameters import Calibration
from meshwright.cost.uncertainty import has_novel_layers
from meshwright.fitting.published_runs import Fitted, without

Progress = Callable[[int], object]
"""Called with the number of rows done since the last call."""


def predict_leave_one_source_out(
    runs: Sequence[PublishedRun], fitted: Fitted, *, intervals: Calibration, progress: Progress = lambda _: None
) -> Predictions:
    """Predict each source by the calibration of all other sources. Every run must have conditions.

    `fitted` gives the efficiency corrections of kernels, `intervals` the scale of intervals.
    """
    columns: dict[str, NDArray[np.generic]] = {}
    whole = fitted.problem.tables.corrections
    corrections = None if whole is None else whole.by_device
    for source, rows in _by_source(runs).items():
        refit = without(fitted, source).with_intervals_of(intervals)
        part = predict([runs[i] for i in rows], calibration=refit, corrections=corrections)
        for name, values in vars(part).items():
            columns.setdefault(name, np.zeros(len(runs), dtype=np.asarray(values).dtype))[rows] = values
        progress(len(rows))
    return Predictions(**columns)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class UnseenErrors:
    """Predictions of n runs, each by a fit without its source."""

    error: NDArray[np.float64]  # log predicted - log measured rate
    sd: NDArray[np.float64]  # of it, with interval scale 1
    case_class: NDArray[np.str_]  # what that fit knew of the case
    unstated: NDArray[np.float64]  # share of the switches of mixtures that the case does not state

    @property
    def is_moe(self) -> NDArray[np.bool_]:
        """True for mixtures of experts of usual layers."""
        return np.char.startswith(self.case_class, "moe")

    @property
    def is_novel(self) -> NDArray[np.bool_]:
        """True for models with layers that few published runs have."""
        return np.char.startswith(self.case_class, "novel")

    def take(self, index: NDArray[np.intp]) -> UnseenErrors:
        """The runs at `index`."""
        return UnseenErrors(
            error=self.error[index], sd=self.sd[index], case_class=self.case_class[index], unstated=self.unstated[index]
        )


def held_out(runs: Sequence[PublishedRun], fitted: Fitted, *, progress: Progress = lambda _: None) -> UnseenErrors:
    """Errors of every run by the fit without its source. Each run has conditions and a rate."""
    error, sd, unstated = np.zeros(len(runs)), np.zeros(len(runs)), np.zeros(len(runs))
    classes = np.full(len(runs), "", dtype="<U32")
    for source, rows in _by_source(runs).items():
        tables = tables_of([c for i in rows if (c := runs[i].conditions) is not None])
        calibration = without(fitted, source).scaled(1.0)
        log_step_s, variances = predict_steps(tables, calibration)
        tokens = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices
        measured = np.array([runs[i].tokens_per_s_per_device for i in rows], dtype=float)
        error[rows] = np.log(tokens / measured) - log_step_s
        sd[rows] = np.sqrt(sum(variances.values()))
        unstated[rows] = tables.facts.unstated_expert_share
        is_moe = np.asarray(tables.model.num_moe_layers) > 0
        classes[rows] = [
            calibration.case_class(f, is_moe=bool(m), is_novel=bool(novel))
            for f, m, novel in zip(tables.factors, is_moe, has_novel_layers(tables.model), strict=True)
        ]
        progress(len(rows))
    return UnseenErrors(error=error, sd=sd, case_class=classes, unstated=unstated)


def _by_source(runs: Sequence[PublishedRun]) -> dict[str, NDArray[np.intp]]:
    names = np.array([run.source_key for run in runs])
    return {source: np.flatnonzero(names == source) for source in sorted(set(names.tolist()))}
