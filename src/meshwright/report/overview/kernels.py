"""Kernels by shape and passes of pipelines in a report: tables, pictures and legends of what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from meshwright.answers.comparison.kernel_sides import CallRates
from meshwright.answers.overview.collect import RecordReport
from meshwright.answers.overview.measured_passes import KINDS, MeasuredPass
from meshwright.answers.quantities import percent, seconds
from meshwright.answers.text_table import TextTable
from meshwright.report.charts import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    OUTLIER_COLOR,
    OUTLIER_LEGEND,
    WIDTH,
    across,
    alt,
    axis_end,
    lines_of,
    rule_at,
)
from meshwright.report.timeline_blocks import Blocks, blocks_svg, windows
from meshwright.units import format_seconds

MOST_CALLS = 40
"""Calls in the figure: those with the lowest share first, which have most to gain."""


def kernels_table(found: RecordReport) -> TextTable:
    """One row for each route of each call."""
    rows = [
        (
            entry.name, c.call, c.route, format_seconds(c.forward_s),
            "" if c.backward_s is None else format_seconds(c.backward_s), _scaled(c.flops_per_s, 1e12),
            _scaled(c.bytes_per_s, 1e9), "" if c.roofline_ratio is None else percent(c.roofline_ratio),
            "" if c.peak_bytes is None else f"{c.peak_bytes / 2**20:,.0f} MiB",
            "" if c.error is None else f"{c.error:.1e}",
            ", ".join(w for w, on in (("default", c.is_default), ("fastest", c.route and c.is_fastest)) if on),
        )
        for entry in found.entries
        for c in entry.kernels
    ]  # fmt: skip
    return TextTable(
        title="Kernels",
        headings=(
            "record", "call", "route", "forward", "backward", "TFLOP/s", "GB/s", "of the roofline", "memory", "error",
            "remark",
        ),
        rows=rows, text_columns=("call", "route", "remark"),
    )  # fmt: skip


def drawn_calls(found: RecordReport) -> list[tuple[str, CallRates]]:
    """The fastest route of every call that has a share of the roofline, lowest share first."""
    many = sum(bool(e.kernels) for e in found.entries) > 1
    calls = [
        (f"{e.name}: {c.call}" if many else c.call, c)
        for e in found.entries
        for c in e.kernels
        if c.is_fastest and c.roofline_ratio
    ]
    return sorted(calls, key=lambda item: item[1].roofline_ratio or 0.0)


def roofline_chart(calls: Sequence[tuple[str, CallRates]]) -> Any:
    """Share of the roofline of each call as a bar, with its time and route."""
    longest = _longest(calls)
    rows = [_bar(name, c, longest) for name, c in calls[:MOST_CALLS]]
    scale = alt.Scale(domain=[0, longest * 1.05], nice=False)
    x = across("share", scale=scale, title="share of the roofline", format="%", tickCount=6)
    base = lines_of(rows, "call", labelLimit=260).encode(x=x)
    color = alt.condition("datum.cut", alt.value(OUTLIER_COLOR), alt.value(BLUE))
    bars = base.mark_bar(opacity=0.5, height={"band": 0.65}).encode(color=color)
    # From the axis on, over the bars: there a text has the width of the whole plot, on a phone too.
    texts = base.mark_text(align="left", color=INK).encode(x=alt.value(5), text="text:N")
    rule = rule_at(1.0, scale=scale, color=ORANGE, strokeDash=[4, 3])
    return alt.layer(bars, rule, texts).properties(width=WIDTH - 100, height={"step": 22})


def roofline_cuts(calls: Sequence[tuple[str, CallRates]]) -> tuple[tuple[str, str], ...]:
    """(name, colour) of bars that are longer than the axis, where there are some."""
    longest = _longest(calls)
    return (OUTLIER_LEGEND,) if any((c.roofline_ratio or 0.0) > longest for _, c in calls[:MOST_CALLS]) else ()


def _longest(calls: Sequence[tuple[str, CallRates]]) -> float:
    return max(1.0, axis_end([c.roofline_ratio or 0.0 for _, c in calls[:MOST_CALLS]]))


def _bar(name: str, call: CallRates, longest: float) -> dict[str, Any]:
    share = call.roofline_ratio or 0.0
    is_cut = share > longest
    above = f"{percent(share)} \u00bb" if is_cut else ""
    text = ", ".join(filter(None, (format_seconds(call.seconds), call.route, above)))
    return {"call": name, "share": min(share, longest), "cut": is_cut, "text": text}


def _scaled(rate: float | None, unit: float) -> str:
    return "" if rate is None else f"{rate / unit:,.3g}" if rate / unit < 1000 else f"{rate / unit:,.0f}"


# --- measured passes ---


COLORS = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
WAITING = ("waiting for another rank", "#c9ced6")


def stages_table(passes: tuple[MeasuredPass, ...], *, name: str) -> TextTable:
    """Median time of a pass by stage and kind, computing and waiting, and the time in which its rank computes none."""
    by_stage: dict[tuple[int, int, str], list[MeasuredPass]] = defaultdict(list)
    for p in passes:
        by_stage[p.pipeline_rank, p.stage, p.kind].append(p)
    idle = idle_ratios(passes)
    rows = []
    for (rank, stage, kind), found in sorted(by_stage.items()):
        times = [p.computing_s for p in found]
        waits = [p.wait_s for p in found if p.wait_s is not None]
        rows.append(
            (stage, rank, KINDS[kind], len(found), seconds(median(times)), seconds(max(times)),
             _wait(waits), percent(idle[rank]))
        )  # fmt: skip
    return TextTable(
        title=f"Measured pipeline of {name}: data",
        headings=("stage", "rank", "pass", "n", "median", "longest", "median wait", "rank not computing"), rows=rows,
        text_columns=("pass",),
    )  # fmt: skip


def _wait(waits: list[float]) -> str:
    """Median of the waits of a kind of pass."""
    if not waits:
        return "not separated"
    return seconds(median(waits)) if any(waits) else "0"


def idle_ratios(passes: tuple[MeasuredPass, ...]) -> dict[int, float]:
    """Share of the time between the first and the last pass of all ranks in which a rank computes none."""
    begin, end = min(p.start_s for p in passes), max(p.end_s for p in passes)
    busy: dict[int, float] = defaultdict(float)
    for p in passes:
        busy[p.pipeline_rank] += p.computing_s
    return {rank: max(0.0, 1 - s / (end - begin)) if end > begin else 0.0 for rank, s in busy.items()}


def passes_svg(passes: tuple[MeasuredPass, ...], *, name: str) -> str:
    """One row a rank, one block a pass; only the first and the last of many passes, as `drawn_windows` chooses."""
    ranks = sorted({p.pipeline_rank for p in passes})
    begin = min(p.start_s for p in passes)
    colors: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for p in passes:
        row = ranks.index(p.pipeline_rank)
        colors[COLORS[p.kind]].append((row, p.computing_from_s - begin, p.end_s - begin))
        if p.wait_s:
            colors[WAITING[1]].append((row, p.start_s - begin, p.computing_from_s - begin))
    blocks = {
        color: Blocks(row=np.array([r for r, _, _ in found]), start_s=np.array([s for _, s, _ in found]),
                      end_s=np.array([e for _, _, e in found]))
        for color, found in colors.items()
    }  # fmt: skip
    title = f"Measured passes of {name} on {len(ranks)} pipeline ranks"
    return blocks_svg(blocks, ranks=ranks, drawn=drawn_windows(passes), title=title)


def drawn_windows(passes: tuple[MeasuredPass, ...]) -> list[tuple[float, float]]:
    """The intervals that are drawn, from the first pass: all of the step, or its beginning and its end."""
    begin, end = min(p.start_s for p in passes), max(p.end_s for p in passes)
    per_rank = len(passes) / len({p.pipeline_rank for p in passes})
    return windows(blocks_per_rank=per_rank, end_s=end - begin)


def passes_legend(passes: tuple[MeasuredPass, ...]) -> tuple[tuple[str, str], ...]:
    """(name, colour) of the kinds of passes, and of waiting."""
    kinds = tuple((name, COLORS[kind]) for kind, name in KINDS.items() if any(p.kind == kind for p in passes))
    return (*kinds, WAITING) if any(p.wait_s for p in passes) else kinds
