"""Errors of predictions of the shipped published runs, as the documentation promises them.

The first block tests the calibration that ships on the rows it was fitted to; the slow test at the end leaves each
source out in turn, which is the error to expect elsewhere. Limits are rounded up from what is reached, so that a
change which loses accuracy shows.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite, log
from statistics import fmean, median

import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.failed import Shares
from meshwright.accuracy.predict import predict
from meshwright.accuracy.report import HEADLINE, AccuracyReport, compare, subset_of
from meshwright.accuracy.rows import read_failed
from meshwright.accuracy.shipped import blind_predictions, failed_configs_path
from meshwright.calibration.parameters import fitted
from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
from meshwright.fitting.published_runs import fit

pytestmark = pytest.mark.when_touched  # unit/accuracy/test_report.py compares and test_predict.py predicts few rows


@pytest.fixture(scope="module")
def report() -> AccuracyReport:
    runs, failed = shipped_runs(), read_failed(failed_configs_path())
    return compare(runs, predict=predict, failed=failed)


def test_nine_of_ten_rows_say_enough_to_be_predicted(report):
    assert report.summary.num_predicted > 0.9 * report.summary.num_rows > 2500


def test_the_headline(report):
    headline = report.groups["subset"][HEADLINE]
    assert headline.num_predicted > 650
    assert headline.median_abs_error <= 0.05
    assert headline.p90_abs_error <= 0.18
    assert abs(headline.bias) <= 0.02


def test_intervals_are_of_strangers(report):
    """They hold four of five rows as predicted before the source was read, and more of the rows that were fitted."""
    for kind in ("dense", "moe"):
        by_source: dict[str, list[bool]] = defaultdict(list)
        for row in report.rows:
            said = blind_predictions().get(row.run.id)
            if said is not None and row.run.groups["architecture"] == kind:
                half_width = log(row.high / row.low) / 2
                by_source[row.run.source_key].append(abs(log(said.predicted / row.measured)) <= half_width)
        assert fmean(map(fmean, by_source.values())) == pytest.approx(0.8, abs=0.05), kind
    assert report.groups["subset"][HEADLINE].interval_coverage >= 0.9


def test_what_was_said_before_a_source_was_read_is_reported(report):
    blind = report.blind
    assert blind["all rows"].num_predicted == blind["dense"].num_predicted + blind["moe"].num_predicted == 227
    assert blind["all rows"].median_abs_error == pytest.approx(0.15, abs=0.005)
    assert blind["all rows"].interval_coverage == pytest.approx(0.40, abs=0.005)


@pytest.mark.parametrize(
    ("kind", "group", "limit"),
    [
        ("accelerator", "h200", 0.08),
        ("accelerator", "gb200", 0.09),
        ("accelerator", "b200", 0.08),
        ("accelerator", "a100", 0.08),
        ("source", "megatron_bridge", 0.09),
        ("source", "mlperf_v5.0", 0.05),
        ("source", "hagemann_layouts", 0.08),
        ("source", "vtrain_single", 0.08),
        ("subset", "other accelerators", 0.15),
        ("architecture", "moe", 0.10),
    ],
)
def test_no_group_is_the_price_of_the_median(report, kind, group, limit):
    assert report.groups[kind][group].median_abs_error <= limit


def test_the_largest_runs_are_neither_too_slow_nor_too_fast(report):
    """4,096 to 11,616 accelerators: what grows with them (stragglers, collectives, few micro-batches) has no bias."""
    large = [r for r in report.rows if r.run.conditions and r.run.conditions.plan.num_devices >= 4096]
    errors = [r.signed_error for r in large if isfinite(r.signed_error)]
    assert len(errors) >= 12
    assert abs(median(errors)) <= 0.03
    assert median(map(abs, errors)) <= 0.04


def test_the_order_of_plans_in_the_sweeps(report):
    """The rates of one sweep are full of stalls that nothing explains; its order of plans is not."""
    assert report.groups["subset"]["sweep vtrain_single"].kendall_tau_mean >= 0.7
    assert report.groups["subset"]["sweep vtrain_single"].top1_regret_mean <= 0.03
    assert report.groups["source"]["hagemann_layouts"].kendall_tau_mean >= 0.7


def test_memory_where_sources_state_what_was_allocated(report):
    allocated = report.memory["allocated"]
    assert allocated["num_rows"] >= 20
    assert allocated["median_abs_error"] <= 0.03
    assert report.summary.memory_median_abs_error <= 0.03


def test_plans_that_ran_out_of_memory_are_rejected(report):
    assert report.failed is not None
    assert report.failed.total.num_failed > 1000
    assert report.failed.total.correctly_rejected_ratio >= 0.80


def test_plans_that_worked_are_not(report):
    """Of runs whose source says what was recomputed. Five on TPUs keep activations in host memory, which the model does
    not take off the device's."""
    assert report.failed is not None
    stated: Shares = report.failed.stated
    assert stated.num_worked > 2000
    assert stated.wrongly_rejected_ratio <= 0.032


@pytest.fixture(scope="module")
def refitted():
    return fit([r for r in shipped_runs() if r.reason is None], made="refitted")


@pytest.mark.when_touched
def test_the_calibration_that_ships_is_fitted_to_the_rows_as_they_are_read_now(refitted):
    """Whatever changes a reading, a default or a mechanism changes the fit, and with it every prediction."""
    shipped = {key: offset.value for key, offset in fitted().offsets.items()}
    found = {key: offset.value for key, offset in refitted.calibration.offsets.items()}
    assert found == pytest.approx(shipped, abs=0.002), "run `python -m meshwright.fitting.ship`"


@pytest.mark.slow
def test_sources_that_the_calibration_has_not_seen(refitted):
    quoted = [run for run in shipped_runs() if run.reason is None and subset_of(run) == HEADLINE]
    report = compare(quoted, predict=lambda rows: predict_leave_one_source_out(rows, refitted, intervals=fitted()))
    headline = report.groups["subset"][HEADLINE]
    assert headline.median_abs_error <= 0.075
    assert headline.p90_abs_error <= 0.22
    assert headline.interval_coverage >= 0.9  # the widths are of sources that nobody had read, which err more
