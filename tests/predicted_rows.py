"""Predictions of published runs that are off by a known ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.rows import PublishedRun
from meshwright.arrays import FloatArray


def ten_percent_high(runs: Sequence[PublishedRun], *, memory_bytes: FloatArray | None = None) -> Predictions:
    """Rates 10 % above the measured ones; `memory_bytes` of each run, by default unknown, fit up to 80 GB."""
    rate = np.array([1.1 * (run.tokens_per_s_per_device or 1.0) for run in runs])
    memory = np.full(len(runs), np.nan) if memory_bytes is None else memory_bytes
    return Predictions(
        tokens_per_s_per_device=rate,
        low=rate * 0.8,
        high=rate * 1.2,
        memory_allocated_bytes=memory,
        memory_reserved_bytes=memory,
        fit_probability=np.where(memory > 80e9, 0.0, 1.0),
    )
