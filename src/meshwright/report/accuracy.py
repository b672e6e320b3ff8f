"""An accuracy report: its tables for the terminal and the page, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from meshwright.accuracy.failed import FailedReport
from meshwright.accuracy.metrics import Metrics
from meshwright.accuracy.report import HEADLINE, AccuracyReport
from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable
from meshwright.calibration.parameters import fitted
from meshwright.report.accuracy_figures import errors_svg, legend, predicted_svg
from meshwright.report.html import PageSection, document, explained_figure, page_table, paragraph, tiles
from meshwright.version import __version__

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


# --- the page ---


TITLE = "Predicted and measured"
LEAVE_ONE_OUT_TITLE = "Predicted and measured, leave-one-source-out"

_FITTED = (
    "These are the rows that the calibration was fitted on ({version}): on another cluster "
    "and software, expect the larger error of --leave-one-source-out."
)
_LEAVE_ONE_OUT = (
    "Each source is predicted by a calibration that never saw it: this is the error to expect on another "
    "cluster and software."
)
_DRAWN = {"accelerator", "source", "architecture", "precision", "framework"}
"""Kinds of groups that get a figure above their table."""


def accuracy_page(report: AccuracyReport, *, leave_one_source_out: bool = False, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it.

    `leave_one_source_out`: each source was predicted by a calibration fitted without it.
    """
    sections = [_rows(report, command), _subsets(report)]
    sections += [_groups(report, kind, command) for kind in report.groups if kind != "subset"]
    sections += [_section(shown) for shown in remaining_tables(report)]
    return document(
        title=LEAVE_ONE_OUT_TITLE if leave_one_source_out else TITLE,
        lead=_lead(report, leave_one_source_out=leave_one_source_out),
        sections=sections,
        footer=f"Meshwright {__version__}. Measurements as their sources published them. {command}",
    )


def _lead(report: AccuracyReport, *, leave_one_source_out: bool) -> str:
    m = report.headline or report.summary
    of = HEADLINE if report.headline else "all rows"
    text = _LEAVE_ONE_OUT if leave_one_source_out else _FITTED.format(version=fitted().made)
    return paragraph(text, css_class="lead") + tiles(_key_figures(m, of))


def _key_figures(m: Metrics, of: str) -> list[tuple[str, str, str]]:
    return [
        (f"{m.num_predicted:,}", "rows predicted", f"of {m.num_rows:,}, {of}"),
        (_known(m.median_abs_error), "median error", "over or under"),
        (_known(m.p90_abs_error), "90th percentile", "of the errors"),
        (f"{100 * m.bias:+.1f} %" if m.bias == m.bias else "–", "bias", "median, + is too optimistic"),
        (_known(m.interval_coverage), "inside the interval", "80 % is right"),
    ]


def _known(ratio: float) -> str:
    return percent(ratio) if ratio == ratio else "–"


def _rows(report: AccuracyReport, command: str) -> PageSection:
    text = (
        "Tokens/s per device of published training runs. Each point is one run, the line is a perfect "
        "prediction, the band is 20 % to either side. Named are the worst predictions of the first kind."
    )
    made = explained_figure(
        predicted_svg(report),
        title="Predicted over measured tokens/s per device",
        data=page_table(rows_table(report)),
        command=command,
        legend=legend(report),
    )
    return PageSection(title="Run by run", parts=[paragraph(text), made])


def _subsets(report: AccuracyReport) -> PageSection:
    text = (
        "Error: predicted over measured, minus one. Sweeps over plans of one source are separate: there "
        "the order of the plans matters more. Regret is the throughput lost by running the plan predicted fastest."
    )
    shown = metrics_table("Subsets", {"all rows": report.summary, **report.groups["subset"]})
    return _section(shown, above=[paragraph(text)])


def _groups(report: AccuracyReport, kind: str, command: str) -> PageSection:
    svg = errors_svg(report, by=kind) if kind in _DRAWN else None
    text = "Bar: the middle half of the rows; line: four fifths; tick: the median."
    shown = metrics_table(f"By {kind}", report.groups[kind])
    if svg is None:
        return _section(shown)
    data = paragraph(f"The data is the table below, {shown.title}.")
    made = explained_figure(svg, title=f"Errors by {kind}", data=data, command=command)
    return _section(shown, above=[paragraph(text), made])


def _section(shown: TextTable, *, above: list[str] | None = None) -> PageSection:
    return PageSection(title=shown.title, parts=[*(above or ()), page_table(shown)])
