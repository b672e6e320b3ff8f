"""Tables and the page of `bench train`: configurations compared, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.answers.provenance import INTERVAL_CONVENTION
from meshwright.answers.quantities import percent, rate, seconds
from meshwright.answers.text_table import TextTable
from meshwright.bench.training_summary import PredictionVerdict, Summary, contests, verdict
from meshwright.records.measurement import ValueRange
from meshwright.report.charts import BLUE, GREEN, INK, PURPLE, RED, WIDTH, across, alt, chart_of, color_by, lines_of
from meshwright.report.figures import svg
from meshwright.report.html import Endnotes, PageSection, figure, measured_page, page_table, paragraph, table_sections
from meshwright.units import format_bytes

INSIDE, OUTSIDE, UNPREDICTED = "inside the interval", "outside", "not predicted"
COLORS = {INSIDE: GREEN, OUTSIDE: RED, UNPREDICTED: PURPLE}
WIDE_RATIO = 5.0
"""Fastest over slowest configuration from which on the figure's axis is logarithmic."""


def speed_table(found: Sequence[Summary]) -> TextTable:
    """Throughput of each configuration, measured and predicted."""
    few = any(s.is_measured and not s.has_confidence for s in found)
    return TextTable.of(
        "Tokens/s/device",
        [s for s in found if s.is_measured],
        {
            "configuration": lambda s: s.name,
            "measured": lambda s: _with_ends(s.tokens_per_s_per_device),
            "predicted": lambda s: "" if s.predicted_rate is None else _with_ends(s.predicted_rate),
            "off by": lambda s: "" if s.error is None else f"{100 * s.error:+z.1f} %",
            "inside": lambda s: {True: "yes", False: "no", None: ""}[s.is_inside],
        },
        caption="Measured: median of the runs and "
        + ("their range" if few else "its 95 % interval")
        + ". Predicted: before each run, with the 80 % interval. Off by: measured over predicted, minus one.",
        text_columns=("inside",),
    )


def use_table(found: Sequence[Summary]) -> TextTable:
    """Step time, MFU and memory of each configuration."""
    measured = [s for s in found if s.is_measured]
    conventions = dict.fromkeys(s.rows[0].mfu_convention for s in measured)
    return TextTable.of(
        "Use of the device",
        measured,
        {
            "configuration": lambda s: s.name,
            "plan": lambda s: s.rows[0].plan,
            "runs": lambda s: len(s.rows),
            "step": lambda s: seconds(s.step_s.value),
            "MFU": lambda s: percent(s.mfu),
            "memory": lambda s: format_bytes(s.peak_memory_bytes),
            "predicted": lambda s: "" if s.predicted_memory_bytes is None else format_bytes(s.predicted_memory_bytes),
            "last loss": lambda s: "" if s.last_loss is None else f"{s.last_loss:.3f}",
        },
        caption=f"MFU: {'; or: '.join(conventions)}.",
        text_columns=("plan",),
    )


def engine_table(found: Sequence[Summary]) -> TextTable:
    """The same configuration on several engines, relative to the first that was measured."""
    rows = []
    for contest in contests(found):
        for engine, s in contest.by_engine.items():
            if not s.is_measured:
                rows.append((contest.name, engine, "", "", "", s.failures[0].reason))
                continue
            loss = "" if s.last_loss is None else f"{s.last_loss:.5f}"
            speed = rate(s.tokens_per_s_per_device.value)
            rows.append((contest.name, engine, speed, f"{contest.ratios[engine]:.2f}", loss, ""))
    return TextTable(
        title="Engines",
        headings=("configuration", "engine", "tokens/s/device", "over the first", "last loss", "why not"),
        rows=rows,
        caption="The same steps on each engine, and the same count of FLOPs: rates compare directly.",
        text_columns=("engine", "why not"),
    )


def failure_table(found: Sequence[Summary]) -> TextTable:
    """Runs that could not be measured, with the reason; equal failures of a configuration once."""
    rows = []
    for s in found:
        kinds = dict.fromkeys((row.status, row.reason) for row in s.failures)
        for status, reason in kinds:
            count = sum((row.status, row.reason) == (status, reason) for row in s.failures)
            rows.append((s.name, status.replace("_", " "), count, reason))
    return TextTable(
        title="Not measured",
        headings=("configuration", "ended", "runs", "why"),
        rows=rows,
        text_columns=("ended", "why"),
    )


def tables(found: Sequence[Summary]) -> list[TextTable]:
    """The tables that have rows."""
    made = (speed_table(found), engine_table(found), use_table(found), failure_table(found))
    return [table for table in made if table.rows]


def outlier_sentences(found: Sequence[Summary]) -> list[str]:
    """Outliers among the runs of each configuration, one sentence each."""
    return [
        f"{s.name}: run {row.run} is an outlier, {seconds(row.step_s_median or 0.0)} a step; "
        "it is included in the median"
        for s in found
        if s.is_measured
        for row in s.outliers
    ]


def accuracy_sentence(judged: PredictionVerdict) -> str:
    """One line: the errors of the predictions."""
    text = f"{judged.num_measured} of {judged.num_configurations} configurations measured"
    if judged.median_error is None:
        return f"{text}; none was predicted."
    inside = judged.num_inside / judged.num_predicted
    return (
        f"{text}. Predictions are off by {percent(judged.median_error)} in the median; the 80 % interval holds "
        f"{judged.num_inside} of {judged.num_predicted} ({percent(inside)})."
    )


def _with_ends(x: ValueRange) -> str:
    return f"{rate(x.value)} ({rate(x.low)}–{rate(x.high)})"


# --- the page ---


def sweep_page(found: Sequence[Summary], *, sidecar: Mapping[str, Any]) -> str:
    """The whole page."""
    judged, notes = verdict(found), Endnotes()
    device = sidecar["device"] or {"name": "an unknown device"}
    measured = [s for s in found if s.is_measured]
    sections = []
    if measured:
        text = (
            "Each configuration was trained several times, each time in a process of its own and in turn with the "
            f"others; the first {sidecar['warmup']} steps do not count, {sidecar['steps']} do."
        )
        legend = [("80 % interval of the prediction", f"{BLUE}47"), *_legend(measured), ("one run", BLUE)]
        parts = [paragraph(text, marks=notes.mark(INTERVAL_CONVENTION)), figure(rates_svg(measured), legend=legend)]
        sections.append(PageSection(title="Measured and predicted", parts=[*parts, page_table(speed_table(found))]))
        sections += table_sections(engine_table(found), use_table(found))
    sections += [*table_sections(failure_table(found)), PageSection(title="Definitions", parts=[notes.html()])]
    return measured_page(
        f"{len(found)} training configurations on {device['name']}", lead=accuracy_sentence(judged),
        key_figures=_tiles(found, judged), notes=outlier_sentences(found), sections=sections,
        conditions=_conditions(sidecar), about=sidecar,
    )  # fmt: skip


def _tiles(found: Sequence[Summary], judged: PredictionVerdict) -> list[tuple[str, str, str]]:
    measured = [s for s in found if s.is_measured]
    shown = []
    if measured:
        best = max(measured, key=lambda s: s.tokens_per_s_per_device.value)
        shown.append((rate(best.tokens_per_s_per_device.value), "tokens/s/device, the fastest", best.name))
    if judged.median_error is not None:
        shown.append((percent(judged.median_error), "off, predictions in the median", "measured over predicted"))
        shown.append((f"{judged.num_inside} of {judged.num_predicted}", "inside the interval", "80 % expected"))
    return shown


def _legend(measured: Sequence[Summary]) -> list[tuple[str, str]]:
    present = {_where(s) for s in measured}
    return [(f"measured, {name}", color) for name, color in COLORS.items() if name in present]


def _where(s: Summary) -> str:
    return {True: INSIDE, False: OUTSIDE, None: UNPREDICTED}[s.is_inside]


def rates_svg(measured: Sequence[Summary]) -> str:
    """Tokens/s/device, one line a configuration: the predicted interval as a band, runs as dots, their median as a
    point with its interval."""
    rows, dots = [], []
    for s in measured:
        found, expected = s.tokens_per_s_per_device, s.predicted_rate
        row = {"name": s.name, "value": found.value, "low": found.low, "high": found.high, "where": _where(s)}
        if expected is not None:
            ends = {"predicted_low": expected.low, "predicted_high": expected.high}
            row |= {"predicted": expected.value, **ends}
        rows.append(row)
        dots += [{"name": s.name, "value": r.tokens_per_s_per_device} for r in s.rows]
    ends = [row[key] for row in rows for key in ("low", "high", "predicted_low", "predicted_high") if key in row]
    is_wide = max(ends) / min(ends) > WIDE_RATIO
    scale = (
        alt.Scale(type="log", domain=[min(ends) / 1.1, max(ends) * 1.1], nice=False)
        if is_wide
        else alt.Scale(domain=[0, max(ends) * 1.05], nice=False)
    )
    x = partial(across, scale=scale, title="tokens/s/device", format="~s", grid=True)
    base = lines_of(rows)
    predicted = base.transform_filter("isValid(datum.predicted)")
    color = color_by("where", COLORS)
    runs = chart_of(dots).encode(y=alt.Y("name:N", sort=[s.name for s in measured]))
    layers = [
        predicted.mark_bar(color=BLUE, opacity=0.28, height={"band": 0.55}).encode(
            x=x("predicted_low"), x2="predicted_high:Q"
        ),
        predicted.mark_tick(color=INK, thickness=1.5, height={"band": 0.55}).encode(x=x("predicted")),
        runs.mark_point(color=BLUE, filled=True, size=18, opacity=0.6, yOffset=8).encode(x=x("value")),
        base.mark_rule(strokeWidth=2).encode(x=x("low"), x2="high:Q", color=color),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x("value"), color=color),
    ]
    chart = alt.layer(*layers).properties(width=WIDTH, height={"step": 38})
    return svg(chart, title="Tokens/s/device of each configuration, measured and predicted")


def _conditions(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    device = sidecar["device"] or {}
    software = {
        f"software, {engine}": ", ".join(f"{name} {version}" for name, version in versions.items())
        for engine, versions in sidecar["software"].items()
    }
    return {
        "device": device.get("name"),
        "memory": device and format_bytes(device["memory_bytes"]),
        "driver": sidecar["driver"],
        "system": device.get("system"),
        **software,
        "revision": sidecar["git_commit"],
    }
