"""The tables of an accuracy report: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from meshwright.accuracy.failed import FailedReport
from meshwright.accuracy.metrics import Metrics
from meshwright.accuracy.report import AccuracyReport
from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable

METRICS_HEADINGS = ("rows", "predicted", "median", "p90", "bias", "in interval", "memory", "regret", "tau")
"""Rows of the group and those predicted; median and 90th percentile of the absolute error; median signed
error; share of measurements inside the interval; median absolute memory error; mean top-1 regret and
Kendall τ of the groups of plans."""

BLIND_TITLE = "As predicted before the source was read"


def accuracy_tables(report: AccuracyReport, *, by: str) -> list[TextTable]:
    """Errors of the subsets, of one kind of group and of memory; rows without a prediction, rows that did not fit."""
    tables = [
        metrics_table("Error of tokens/s per device", {"all rows": report.summary, **report.groups["subset"]}),
        metrics_table(f"By {by}", report.groups[by]),
    ]
    return tables + remaining_tables(report)


def remaining_tables(report: AccuracyReport) -> list[TextTable]:
    """Tables of blind predictions, memory, unpredicted rows and configurations that did not fit."""
    tables = [metrics_table(BLIND_TITLE, report.blind)] if report.blind else []
    tables += [_memory_table(report.memory)] if report.memory else []
    if report.unpredicted:
        rows = list(report.unpredicted.items())
        tables.append(TextTable(title="Not predicted", headings=("reason", "rows"), rows=rows))
    if report.failed is not None:
        tables.append(_failed_table(report.failed))
    return tables


def metrics_table(title: str, groups: Mapping[str, Metrics]) -> TextTable:
    """One row a group; cells are empty where there is no value."""
    rows = [(name, *_metrics_cells(metrics)) for name, metrics in groups.items()]
    return TextTable(title=title, headings=("", *METRICS_HEADINGS), rows=rows)


def rows_table(report: AccuracyReport) -> TextTable:
    """Every published row: rates in tokens/s per device."""
    reason = "not predicted because"
    return TextTable(
        title="Rows",
        headings=("id", "predicted", "low", "high", "measured", "error", reason),
        rows=[
            (
                row.run.id,
                *(_rate(value) for value in (row.predicted, row.low, row.high, row.measured)),
                _signed(row.signed_error),
                row.run.reason,
            )
            for row in report.rows
        ],
        text_columns=(reason,),
    )


def _metrics_cells(m: Metrics) -> tuple[str, ...]:
    return (
        f"{m.num_rows:,}",
        f"{m.num_predicted:,}",
        _percent(m.median_abs_error),
        _percent(m.p90_abs_error),
        _signed(m.bias),
        _percent(m.interval_coverage),
        _percent(m.memory_median_abs_error),
        _percent(m.top1_regret_mean),
        f"{m.kendall_tau_mean:.2f}" if isfinite(m.kendall_tau_mean) else "",
    )


def _memory_table(memory: Mapping[str, Mapping[str, float]]) -> TextTable:
    return TextTable(
        title="Error of memory, by the source's count",
        headings=("counts", "rows", "median", "p90", "bias"),
        rows=[
            (
                kind,
                f"{errors['num_rows']:,}",
                _percent(errors["median_abs_error"]),
                _percent(errors["p90_abs_error"]),
                _signed(errors["bias"]),
            )
            for kind, errors in memory.items()
        ],
    )


def _failed_table(failed: FailedReport) -> TextTable:
    listed = {
        "all": failed.total,
        "recomputation stated": failed.stated,
        "not stated": failed.unstated,
        "sources with failures": failed.same_sources,
        **failed.by_source,
    }
    return TextTable(
        title="Does it fit in memory",
        headings=("", "ran out of memory", "rightly rejected", "worked", "wrongly rejected"),
        rows=[
            (
                name,
                f"{shares.num_failed:,}",
                _percent(shares.correctly_rejected_ratio),
                f"{shares.num_worked:,}",
                _percent(shares.wrongly_rejected_ratio),
            )
            for name, shares in listed.items()
        ],
    )


def _percent(ratio: float) -> str:
    return percent(ratio) if isfinite(ratio) else ""


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %" if isfinite(ratio) else ""


def _rate(tokens_per_s: float) -> str:
    return rate(tokens_per_s) if isfinite(tokens_per_s) else ""
