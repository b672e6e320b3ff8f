"""An accuracy report: its tables for the terminal and the page, and the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from meshwright.accuracy.failed import FailedReport
from meshwright.accuracy.metrics import Metrics
from meshwright.accuracy.report import HEADLINE, AccuracyReport, RowReport
from meshwright.answers.accuracy_study import AccuracyStudy
from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable
from meshwright.calibration.parameters import fitted
from meshwright.report.charts import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    ROOMY,
    WIDTH,
    across,
    alt,
    chart_of,
    color_by,
    lines_of,
    rule_at,
    up,
)
from meshwright.report.figures import svg
from meshwright.report.html import PageSection, document, explained_figure, page_table, paragraph, tiles
from meshwright.version import __version__

METRICS: dict[str, Callable[[Metrics], str]] = {
    "rows": lambda m: f"{m.num_rows:,}",
    "predicted": lambda m: f"{m.num_predicted:,}",
    "median": lambda m: _percent(m.median_abs_error),
    "p90": lambda m: _percent(m.p90_abs_error),
    "bias": lambda m: _signed(m.bias),
    "in interval": lambda m: _percent(m.interval_coverage),
    "memory": lambda m: _percent(m.memory_median_abs_error),
    "regret": lambda m: _percent(m.top1_regret_mean),
    "tau": lambda m: f"{m.kendall_tau_mean:.2f}" if isfinite(m.kendall_tau_mean) else "",
}
"""Rows of the group and those predicted; median and 90th percentile of the absolute error; median signed
error; share of measurements inside the interval; median absolute memory error; mean top-1 regret and
Kendall τ of the groups of plans."""

BLIND_TITLE = "As predicted before the source was read"


def accuracy_tables(report: AccuracyReport, *, by: str) -> list[TextTable]:
    """Errors of the subsets, of one kind of group and of memory; rows without a prediction, rows that did not fit."""
    tables = [
        metrics_table("Error of tokens/s per device", report.by_subset),
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
    rows = [(name, *(cell(metrics) for cell in METRICS.values())) for name, metrics in groups.items()]
    return TextTable(title=title, headings=("", *METRICS), rows=rows)


def rows_table(report: AccuracyReport) -> TextTable:
    """Every published row: rates in tokens/s per device."""
    reason = "not predicted because"
    columns: dict[str, Callable[[RowReport], object]] = {
        "id": lambda row: row.run.id,
        "predicted": lambda row: _rate(row.predicted),
        "low": lambda row: _rate(row.low),
        "high": lambda row: _rate(row.high),
        "measured": lambda row: _rate(row.measured),
        "error": lambda row: _signed(row.signed_error),
        reason: lambda row: row.run.reason,
    }
    return TextTable.of("Rows", report.rows, columns, text_columns=(reason,))


def _rate(value: float) -> str:
    return rate(value) if isfinite(value) else ""


def _memory_table(memory: Mapping[str, Mapping[str, float]]) -> TextTable:
    columns: dict[str, Callable[[str], str]] = {
        "counts": lambda kind: kind,
        "rows": lambda kind: f"{memory[kind]['num_rows']:,}",
        "median": lambda kind: _percent(memory[kind]["median_abs_error"]),
        "p90": lambda kind: _percent(memory[kind]["p90_abs_error"]),
        "bias": lambda kind: _signed(memory[kind]["bias"]),
    }
    return TextTable.of("Error of memory, by the source's count", memory, columns)


def _failed_table(failed: FailedReport) -> TextTable:
    listed = {
        "all": failed.total,
        "recomputation stated": failed.stated,
        "not stated": failed.unstated,
        "sources with failures": failed.same_sources,
        **failed.by_source,
    }
    columns: dict[str, Callable[[str], str]] = {
        "": lambda name: name,
        "ran out of memory": lambda name: f"{listed[name].num_failed:,}",
        "rightly rejected": lambda name: _percent(listed[name].correctly_rejected_ratio),
        "worked": lambda name: f"{listed[name].num_worked:,}",
        "wrongly rejected": lambda name: _percent(listed[name].wrongly_rejected_ratio),
    }
    return TextTable.of("Does it fit in memory", listed, columns)


def _percent(ratio: float) -> str:
    return percent(ratio) if isfinite(ratio) else ""


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+z.1f} %" if isfinite(ratio) else ""


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


def accuracy_page(study: AccuracyStudy, *, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it."""
    report, is_refitted = study.report, study.leave_one_source_out
    of_subsets = (
        "Error: predicted over measured, minus one. Sweeps over plans of one source are separate: there "
        "the order of the plans matters more. Regret is the throughput lost by running the plan predicted fastest."
    )
    subsets = _section(metrics_table("Subsets", report.by_subset), above=[paragraph(of_subsets)])
    sections = [_rows(report, command), subsets]
    sections += [_groups(report, kind, command) for kind in report.groups if kind != "subset"]
    sections += [_section(shown) for shown in remaining_tables(report)]
    m = report.headline or report.summary
    of = HEADLINE if report.headline else "all rows"
    text = _LEAVE_ONE_OUT if is_refitted else _FITTED.format(version=fitted().made)
    return document(
        title=LEAVE_ONE_OUT_TITLE if is_refitted else TITLE,
        lead=paragraph(text, css_class="lead") + tiles(_key_figures(m, of)),
        sections=sections,
        footer=f"Meshwright {__version__}. Measurements as their sources published them. {command}",
    )


def _key_figures(m: Metrics, of: str) -> list[tuple[str, str, str]]:
    return [
        (f"{m.num_predicted:,}", "rows predicted", f"of {m.num_rows:,}, {of}"),
        (_known(m.median_abs_error), "median error", "over or under"),
        (_known(m.p90_abs_error), "90th percentile", "of the errors"),
        (f"{100 * m.bias:+z.1f} %" if m.bias == m.bias else "–", "bias", "median, + is too optimistic"),
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


# --- figures ---


SIDE = 560
NEAR = 0.2
"""Relative width of the band on each side of a perfect prediction."""

MOST_NAMES, LABEL_WIDTH, LABEL_HEIGHT = 8, 0.24, 0.03
"""Points with a name, and the room of one as shares of the figure's side."""

MAX_GROUPS = 24
MAX_ERROR = 1.5
"""End of the axis of errors. A prediction above 2.5 times the measurement is drawn at the end."""

LEGEND = {HEADLINE: BLUE, "other quality, GPU, no sweep": GREEN, "sweeps": PURPLE, "other accelerators": ORANGE}


def subset_of(row: RowReport) -> str:
    """The entry of `LEGEND` that a row belongs to."""
    if row.run.is_sweep:
        return "sweeps"
    if not row.run.is_gpu:
        return "other accelerators"
    return HEADLINE if row.run.quality_letter == "A" else "other quality, GPU, no sweep"


def legend(report: AccuracyReport) -> list[tuple[str, str]]:
    """(name, colour) of the subsets that the figure of `report` shows."""
    present = {subset_of(row) for row in _comparable(report)}
    return [(name, color) for name, color in LEGEND.items() if name in present]


def predicted_svg(report: AccuracyReport) -> str:
    """Predicted over measured rates on logarithmic axes, one point a row, the headline rows on top."""
    order = list(LEGEND)[::-1]
    points = sorted(
        (
            {"measured": row.measured, "predicted": row.predicted, "subset": subset_of(row)}
            for row in _comparable(report)
        ),
        key=lambda point: order.index(point["subset"]) if point["subset"] != "sweeps" else -1,
    )
    rates = [rate for p in points for rate in (p["measured"], p["predicted"])] or [1.0]
    ends = [min(rates) / 1.5, max(rates) * 1.5]
    line = [{"x": e, "y": e, "low": e * (1 - NEAR), "high": e * (1 + NEAR)} for e in ends]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    first, last = (int(np.floor(np.log10(end))) for end in ends)
    axis = {"scale": scale, "format": "~s", "values": [10.0**k for k in range(first + 1, last + 1)], "grid": True}
    x = partial(across, title="measured tokens/s per device", **axis)
    y = partial(up, title="predicted tokens/s per device", **axis)
    band = chart_of(line).mark_area(opacity=0.5, color=FAINT, clip=True, aria=False)
    exact = chart_of(line).mark_line(color=INK, strokeWidth=1, aria=False)
    dots = chart_of(points).mark_circle(size=16, opacity=0.55, aria=False)
    worst = _worst(report, ends)
    names = [
        chart_of([w for w in worst if w["is_over"] == is_over])
        .mark_text(align="right" if is_over else "left", dx=-6 if is_over else 6, color=INK, style=ROOMY)
        .encode(x=x("measured"), y=y("predicted"), text="id:N")
        for is_over in (True, False)
    ]
    chart = alt.layer(
        band.encode(x=x("x"), y=y("low"), y2="high:Q"),
        exact.encode(x=x("x"), y=y("y")),
        dots.encode(x=x("measured"), y=y("predicted"), color=color_by("subset", LEGEND)),
        *names,
    ).properties(width=SIDE, height=SIDE)
    return svg(chart, title="Predicted over measured tokens/s per device, one point a published run")


def _worst(report: AccuracyReport, ends: Sequence[float]) -> list[dict[str, Any]]:
    """Names of the worst predictions of the headline rows that do not run into each other."""
    rows = [row for row in _comparable(report) if subset_of(row) == HEADLINE and abs(row.signed_error) > NEAR]
    rows.sort(key=lambda row: -abs(np.log(row.predicted / row.measured)))
    span = np.log(ends[1] / ends[0])
    found: list[dict[str, Any]] = []
    for row in rows:
        near = any(
            abs(np.log(row.predicted / other["predicted"])) < LABEL_HEIGHT * span
            and abs(np.log(row.measured / other["measured"])) < LABEL_WIDTH * span
            for other in found
        )
        is_over = row.predicted > row.measured  # its name stands on the side away from the line
        room = np.log(row.measured / ends[0] if is_over else ends[1] / row.measured)
        if not near and room > LABEL_WIDTH * span and len(found) < MOST_NAMES:
            found.append({"id": row.run.id, "measured": row.measured, "predicted": row.predicted, "is_over": is_over})
    return found


def errors_svg(report: AccuracyReport, *, by: str) -> str | None:
    """Signed errors by group: quartiles as a bar, 10th to 90th percentile as a line, the median as a tick.

    The groups with most predicted rows; None when no row was predicted.
    """
    errors: Mapping[str, list[float]] = defaultdict(list)
    for row in _comparable(report):
        errors[row.run.groups[by]].append(row.signed_error)
    largest = sorted(errors.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_GROUPS]
    rows = [_quantile_row(f"{group} ({len(values):,})", values) for group, values in largest]
    if not rows:
        return None
    scale = alt.Scale(domain=[-1, MAX_ERROR], clamp=True, nice=False)
    x = across("low", scale=scale, format="+%", tickCount=6, title="prediction against measurement")
    base, exact = lines_of(rows, "group", labelLimit=260), rule_at(0, scale=scale, color=FAINT)
    whole = base.mark_rule(color=BLUE, strokeWidth=1.5).encode(x=x, x2="high:Q")
    half = base.mark_bar(color=BLUE, opacity=0.55, height={"band": 0.55})
    middle = half.encode(x=across("quarter", scale=scale), x2="three_quarters:Q")
    median = base.mark_tick(color=INK, thickness=2, size=14).encode(x=across("median", scale=scale))
    chart = alt.layer(exact, whole, middle, median).properties(width=WIDTH, height={"step": 20})
    return svg(chart, title=f"Error of the predicted rate by {by}")


def _quantile_row(group: str, errors: Sequence[float]) -> dict[str, Any]:
    names = ("low", "quarter", "median", "three_quarters", "high")
    found = np.quantile(errors, (0.1, 0.25, 0.5, 0.75, 0.9))
    return {"group": group, **dict(zip(names, found.tolist(), strict=True))}


def _comparable(report: AccuracyReport) -> list[RowReport]:
    return [row for row in report.rows if row.predicted > 0 and row.measured > 0]
