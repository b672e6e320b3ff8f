"""Leave-one-source-out: each published source predicted by a calibration fitted to all other sources.

This is the error to expect on an unseen cluster and software. The error on fitted rows is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.predict import predict, predict_steps
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import tables_of
from meshwright.calibration.parameters import Calibration
from meshwright.cost.uncertainty import kinds_of
from meshwright.fitting.published_runs import Fitted, without

Progress = Callable[[int], object]
"""Called with the number of rows done since the last call."""


def predict_leave_one_source_out(
    runs: Sequence[PublishedRun], fitted: Fitted, *, intervals: Calibration, progress: Progress = lambda _: None
) -> Predictions:
    """Predict each source by the calibration of all other sources, with the scale of the intervals of `intervals`.

    Every run must have conditions.
    """
    columns: dict[str, NDArray[np.generic]] = {}
    for source, rows in _by_source(runs).items():
        refit = without(fitted, source).with_intervals_of(intervals)
        part = predict([runs[i] for i in rows], calibration=refit)
        for name, values in vars(part).items():
            columns.setdefault(name, np.zeros(len(runs), dtype=np.asarray(values).dtype))[rows] = values
        progress(len(rows))
    return Predictions(**columns)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class UnseenErrors:
    """Predictions of n runs, each by a fit without its source."""

    error: NDArray[np.float64]  # log predicted - log measured rate
    sd: NDArray[np.float64]  # of it, as the parameters' spread and the residual have it
    kind: NDArray[np.str_]  # of model: `cost.uncertainty.kinds_of`
    source: NDArray[np.str_]

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> UnseenErrors:
        """The runs at `index`."""
        return UnseenErrors(
            error=self.error[index], sd=self.sd[index], kind=self.kind[index], source=self.source[index]
        )


def errors_by(calibration: Calibration, runs: Sequence[PublishedRun]) -> UnseenErrors:
    """Errors of `runs`, each with conditions and a rate, by a calibration that has not seen them."""
    tables = tables_of([run.conditions for run in runs if run.conditions is not None])
    log_step_s, variances = predict_steps(tables, calibration)
    tokens = tables.batch.global_batch * tables.batch.seq_len / tables.plan.num_devices
    measured = np.array([run.tokens_per_s_per_device for run in runs], dtype=float)
    return UnseenErrors(
        error=np.log(tokens / measured) - log_step_s,
        sd=np.sqrt(sum(variances.values())),
        kind=np.broadcast_to(kinds_of(tables.model), len(runs)),
        source=np.array([run.source_key for run in runs]),
    )


def held_out(runs: Sequence[PublishedRun], fitted: Fitted) -> UnseenErrors:
    """Errors of every run by the fit without its source, source by source. Each has conditions and a rate."""
    parts = [errors_by(without(fitted, source), [runs[i] for i in rows]) for source, rows in _by_source(runs).items()]
    names = [f.name for f in fields(UnseenErrors)]
    return UnseenErrors(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _by_source(runs: Sequence[PublishedRun]) -> dict[str, NDArray[np.intp]]:
    names = np.array([run.source_key for run in runs])
    return {source: np.flatnonzero(names == source) for source in sorted(set(names.tolist()))}
