"""The page of an accuracy report: predictions against measurements, and the errors by group."""

from __future__ import annotations

from meshwright.accuracy.metrics import Metrics
from meshwright.accuracy.report import HEADLINE, AccuracyReport
from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.calibration.parameters import fitted
from meshwright.report.accuracy_figures import errors_svg, legend, predicted_svg
from meshwright.report.accuracy_tables import metrics_table, remaining_tables, rows_table
from meshwright.report.html import PageSection, document, explained_figure, page_table, paragraph, tiles
from meshwright.version import __version__

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
