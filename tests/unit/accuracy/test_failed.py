"""Runs that state what decides their memory, and the counts of the shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from meshwright.accuracy.failed import judge, states_memory
from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.rows import PublishedRun

ReadOne = Callable[..., PublishedRun]


def fitting(*probabilities: float) -> Predictions:
    numbers = np.ones(len(probabilities))
    return Predictions(
        tokens_per_s_per_device=numbers,
        low=numbers,
        high=numbers,
        memory_allocated_bytes=numbers,
        memory_reserved_bytes=numbers,
        fit_probability=np.array(probabilities, dtype=float),
    )


@pytest.mark.parametrize(
    ("cells", "states"),
    [
        ({"recompute": "none"}, True),
        ({"recompute": "full"}, True),
        ({"recompute": "selective(core_attn)"}, True),
        ({"recompute": ""}, False),
        ({"recompute": "custom"}, False),  # read as full
        ({"recompute": "full", "notes": "activations offloaded to the host"}, False),
    ],
)
def test_what_a_source_must_state(read_one: ReadOne, cells: dict[str, str], states: bool) -> None:
    assert states_memory(read_one(**cells)) is states


def test_runs_that_leave_recomputation_open_are_counted_apart(read_one: ReadOne) -> None:
    stated, open_ = read_one(recompute="none"), read_one(recompute="")
    failed = [read_one(failed=True, recompute="none", metric_kind="oom", tok_s_gpu_best="") for _ in range(3)]
    report = judge(
        failed, fitting(False, False, True), [stated, stated, open_], fitting(True, True, False), excluded=Counter()
    )
    assert report.total.correctly_rejected_ratio == pytest.approx(2 / 3)
    assert report.total.wrongly_rejected_ratio == pytest.approx(1 / 3)
    assert (report.stated.num_worked, report.stated.wrongly_rejected_ratio) == (2, 0)
    assert (report.unstated.num_worked, report.unstated.wrongly_rejected_ratio) == (1, 1)
    assert report.as_json()["stated"] == report.stated
    assert list(report.by_source) == [stated.source_key]


def test_a_run_that_may_fit_is_not_rejected_and_a_failure_that_may_fit_is(read_one: ReadOne) -> None:
    worked, oom = read_one(), read_one(failed=True, metric_kind="oom", tok_s_gpu_best="")
    report = judge([oom] * 3, fitting(0.9, 0.3, 0.05), [worked] * 3, fitting(0.9, 0.3, 0.05), excluded=Counter())
    assert (report.total.num_failed_rejected, report.total.num_worked_rejected) == (2, 1)
