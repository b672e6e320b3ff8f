"""Figures as inline SVG, drawn offline by Altair and vl-convert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from meshwright.answers.components import ComponentFamily, family, label, shown_components
from meshwright.answers.memory_over_time import MemoryOverTime
from meshwright.answers.quantities import percent, seconds
from meshwright.errors import InputError, printable
from meshwright.files import write_atomically
from meshwright.planner.rank_memory import RankMemory
from meshwright.report.charts import (
    BLUE,
    FAINT,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    ROOMY,
    TEAL,
    WIDTH,
    across,
    alt,
    chart_of,
    color_by,
    lines_of,
    stacked,
    up,
)
from meshwright.units import gib

FAMILY_COLORS = {
    ComponentFamily.MATRIX: BLUE, ComponentFamily.MEMORY: TEAL, ComponentFamily.RECOMPUTATION: PURPLE,
    ComponentFamily.COMMUNICATION: ORANGE, ComponentFamily.WAITING: RED,
}  # fmt: skip
MEMORY_COLORS = {
    "weights": BLUE, "gradients": TEAL, "optimizer": GREEN, "activations": ORANGE, "workspace": PURPLE,
    "beside the allocator": GRAY,
}  # fmt: skip
NARROW_WIDTH, NARROW_HEIGHT, NARROW_LABELS = 205, 280, 105
"""Pixels of the plot and of the labels of its axis on a phone."""
NARROW_TITLE = 34
"""Characters in a line of an axis's title on a phone: about the width of the plot."""
WIDE_FIGURE, NARROW_FIGURE = 728, 350
"""Pixels of a whole figure: one of two columns, and a phone's window, show its texts at their size or larger."""
PARETO_HEIGHT, LETTER_WIDTH = 300, 7.6
"""Pixels of a plot with a Pareto front, and of a letter."""
DRAWS = "vl_convert"
HOW_TO_DRAW = "figures are drawn by the package vl-convert-python, which is not installed"
"""33 MiB, which a bundle for a machine without a network may leave behind (scripts/bundle.py)."""

LABEL_GAP = 8
"""Least pixels between the labels of two ticks; a label that comes nearer is not drawn."""


ZERO_LABEL = "replace(datum.label, /^0[kMGTmu\u00b5n]$/, '0')"
"""Label of a tick: d3's prefix of the axis says nothing at zero (0k)."""


def family_legend(components_s: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, colour) of the families that a waterfall shows."""
    present = {family(name) for name in shown_components(components_s)}
    return [(f.value, color) for f, color in FAMILY_COLORS.items() if f in present]


def memory_legend() -> list[tuple[str, str]]:
    """(name, colour) of the parts of memory."""
    return list(MEMORY_COLORS.items())


def svg(drawn: Any, *, title: str) -> str:
    """The SVG text of an Altair chart, to stand inside a page; `title` is for screen readers.

    It is drawn twice: for wide windows and paper, and for phones, whose style sheet shows the second. Without
    vl-convert a sentence stands in its place.
    """
    if find_spec(DRAWS) is None:
        return f"<p>The figure “{escape(title)}” is left out: {HOW_TO_DRAW}.</p>"
    spec = drawn.configure(**chart_config()).to_dict()
    wide = _fitted(spec, WIDE_FIGURE, title=title, attributes='class="for-wide"')
    # A notebook has no style sheet of ours: the narrow figure is hidden unless a page shows it.
    hidden = 'class="for-narrow" style="display:none"'
    return wide + _fitted(_narrowed(spec), NARROW_FIGURE, title=title, attributes=hidden)


def _fitted(spec: dict[str, Any], width: int, *, title: str, attributes: str) -> str:
    """The SVG text of a figure, `width` pixels wide with the labels of its axes, whose width only drawing tells."""
    import vl_convert

    text = fitting = ""
    for _ in range(3):  # other ticks have labels of another length
        text = vl_convert.vegalite_to_svg(_printable(spec)).replace('class="marks"', attributes, 1)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
        found = re.search(r' viewBox="0 0 ([\d.]+)', text)
        excess = float(found[1]) - width if found else 0.0
        fitting = text if excess <= 2 else fitting
        if abs(excess) <= 2 or not isinstance(plot := spec.get("width"), int | float):
            break
        spec = {**spec, "width": plot - excess}
    return fitting or text  # a wider plot can gain a label that makes it too wide: then the narrower one


def _printable(value: Any) -> Any:
    """Return a part of a figure with its texts as XML can hold them: of others vl-convert ends the process."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _narrowed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figure for a phone: a narrow plot, shorter labels, text at its full size."""
    shape: dict[str, Any] = {}
    if isinstance(spec.get("width"), int | float):
        shape["width"] = NARROW_WIDTH
    if isinstance(spec.get("height"), int | float):
        shape["height"] = min(spec["height"], NARROW_HEIGHT)
    config = dict(spec.get("config", {}))
    config["axis"] = {**config.get("axis", {}), "labelLimit": NARROW_LABELS}
    config["legend"] = {**config.get("legend", {}), "columns": 1}
    config["padding"] = {"left": 12, "right": 26, "top": 4, "bottom": 4}  # fonts of browsers are wider than measured
    return {**_narrow_texts(spec), **shape, "config": config}


def _narrow_texts(part: Any) -> Any:
    """Return the specification with limited axis labels, broken titles and less room for texts."""
    if isinstance(part, list):
        return [_narrow_texts(v) for v in part if not (isinstance(v, Mapping) and ROOMY in str(v.get("mark")))]
    if not isinstance(part, Mapping):
        return part
    found = {k: _narrow_texts(v) for k, v in part.items() if k not in ("labelLimit", "data", "datasets")}
    if isinstance(title := found.get("title"), str):
        found["title"] = wrap(title, NARROW_TITLE) or title
    if found.get("type") == "text" and "limit" in found:
        found["limit"] *= NARROW_WIDTH / WIDTH
    return found | {k: part[k] for k in ("data", "datasets") if k in part}


def waterfall_svg(components_s: Mapping[str, float]) -> str:
    """A step from left to right: each component begins where the one above it ends."""
    shown, whole = shown_components(components_s), sum(components_s.values())
    rows = [
        row | {
            "part": label(name), "family": family(name).value, "text": f"{seconds(length)}  {percent(length / whole)}",
        }
        for row, (name, length) in zip(stacked(shown), shown.items(), strict=True)
    ]  # fmt: skip
    limit = max(accumulate(shown.values()))
    base, scale = lines_of(rows, "part"), alt.Scale(domain=[0, limit * 1.22], nice=False)
    color = color_by("family", {f.value: c for f, c in FAMILY_COLORS.items()}, {r["family"] for r in rows})
    x = across("start", title="seconds of one step", scale=scale)
    bars = base.mark_bar(height={"band": 0.72}).encode(x=x, x2="end:Q", color=color)
    text = base.mark_text(align="left", dx=5, color=INK).encode(x="end:Q", text="text:N")
    return svg((bars + text).properties(width=WIDTH, height={"step": 24}), title="Step time by component")


def memory_svg(parts_bytes: Mapping[str, float], *, capacity_bytes: float) -> str:
    """Memory of the fullest stage as one bar, and the capacity as a line."""
    rows = stacked({name: gib(size) for name, size in parts_bytes.items()}, row="reserved")
    scale = alt.Scale(domain=[0, gib(max(sum(parts_bytes.values()), capacity_bytes)) * 1.08], nice=False)
    bars = chart_of(rows).mark_bar().encode(
        x=across("start", title="GiB per device", scale=scale), x2="end:Q",
        y=alt.Y("row:N", title=None, axis=None), color=color_by("part", MEMORY_COLORS, parts_bytes),
    )  # fmt: skip
    limit = chart_of([{"x": gib(capacity_bytes), "text": "capacity"}])
    rule = limit.mark_rule(color=INK, strokeWidth=2).encode(x="x:Q")
    text = limit.mark_text(align="right", dx=-5, dy=-28, color=INK).encode(x="x:Q", text="text:N")
    drawn = (bars + rule + text).properties(width=WIDTH + 140, height=48)
    return svg(drawn, title="Memory of the fullest pipeline stage by part")


def rank_memory_svg(ranks: Sequence[RankMemory]) -> str:
    """Memory of a device of every pipeline rank as a bar of parts."""
    rows = [r for f in ranks for r in stacked({n: gib(size) for n, size in f.parts_bytes.items()}, rank=f.rank)]
    drawn = chart_of(rows).mark_bar(height={"band": 0.8}).encode(
        x=across("start", title="GiB per device"), x2="end:Q", y=alt.Y("rank:O", title="pipeline rank"),
        color=color_by("part", MEMORY_COLORS, {r["part"] for r in rows}),
    )  # fmt: skip
    return svg(drawn.properties(width=WIDTH, height={"step": 18}), title="Memory of every pipeline rank by part")


LEAST_POINTS = 48
"""Of the figure of memory over time: about eight passes."""


def memory_over_time_svg(found: MemoryOverTime) -> str:
    """Memory of a rank by part as areas, from the beginning of the step until half as long again as its peak."""
    times = found.times_s
    end = max(1.5 * found.peak.at_s, float(times[min(LEAST_POINTS, len(times)) - 1]))
    num = int(np.searchsorted(times, end, side="right"))
    apart = times[:num] + np.arange(num) * 1e-9 * end  # a jump is two points in this order
    rows: list[dict[str, float | str]] = []
    low = np.zeros(num)
    columns = {name: column[:num] for name, column in found.parts_bytes.items() if column.any()}
    # Parts that stay lie below, with two points each.
    for name, column in sorted(columns.items(), key=lambda item: bool(np.ptp(item[1]))):
        high = low + column
        some = slice(None) if np.ptp(high) else slice(None, None, max(1, num - 1))
        points = zip(apart[some].tolist(), low[some].tolist(), high[some].tolist(), strict=True)
        rows += [{"part": name, "s": s, "start": gib(below), "end": gib(above)} for s, below, above in points]
        low = high
    x = across("s", title="seconds of one step", scale=alt.Scale(domain=[0, end], nice=False))
    y, color = up("start", title="GiB per device"), color_by("part", MEMORY_COLORS, columns)
    areas = chart_of(rows).mark_area().encode(x=x, y=y, y2="end:Q", color=color)
    title = f"Memory of rank {found.rank} during one step by part"
    return svg(areas.properties(width=WIDTH, height=220), title=title)


def shares_svg(shares: Mapping[str, float], *, title: str, labels: Mapping[str, str] | None = None) -> str:
    """Bars of shares that sum to one, in the order given, with `labels` or else percentages."""
    labels = labels or {name: percent(share) for name, share in shares.items()}
    rows = [{"name": n, "share": s, "text": labels[n]} for n, s in shares.items()]
    base = lines_of(rows).encode(x=across("share", title=None, scale=alt.Scale(domain=[0, 1]), format="%", tickCount=5))
    bars = base.mark_bar(color=BLUE, height={"band": 0.7})
    texts = base.mark_text(align="left", dx=5, color=INK).encode(text="text:N")
    return svg((bars + texts).properties(width=WIDTH, height={"step": 22}), title=title)


def pareto_svg(rows: Sequence[dict[str, Any]], *, x: Any, y: Any, title: str, is_log: bool = False) -> str:
    """Points with a name, x, y, `front` (yes or no) and, where they have a spread, low and high.

    Those on the Pareto front are joined by a line. A name that would lie on another one is left to the table.
    `is_log`: the x axis is logarithmic.
    """
    base = chart_of(rows).encode(x=x, y=y)
    color = color_by("front", {"no": BLUE, "yes": GREEN})
    line = base.transform_filter("datum.front == 'yes'").mark_line(color=GREEN, strokeWidth=1.5)
    layers = [line.encode(order="x:Q"), base.mark_point(filled=True, size=70, opacity=1).encode(color=color)]
    if "low" in rows[0]:
        layers.append(base.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q", color=color))
    on_phone = {row["name"] for row in _apart(rows, width=NARROW_WIDTH, is_log=is_log)}
    for row in _apart(rows, width=WIDTH - 60, is_log=is_log):
        text = chart_of([row]).mark_text(
            align=row["align"], dx=NAME_GAP if row["align"] == "left" else -NAME_GAP, dy=-6, color=INK,
            style=[] if row["name"] in on_phone else [ROOMY],
        )  # fmt: skip
        layers.append(text.encode(x=x, y=y, text="name:N"))
    return svg(alt.layer(*layers).properties(width=WIDTH, height=PARETO_HEIGHT), title=title)


NAME_GAP = 7
"""Pixels between a point, of about 5 around its middle, and its name."""


def _apart(rows: Sequence[dict[str, Any]], *, width: float, is_log: bool) -> list[dict[str, Any]]:
    """Rows whose names have room in a plot of this width, first those on the front, and cover no point."""
    along = [np.log10(row["x"]) if is_log else row["x"] for row in rows]
    start, end = (np.floor(min(along)), np.ceil(max(along))) if is_log else (0.0, max(along))
    low, high = min(row["y"] for row in rows), max(row["y"] for row in rows)
    left = [(at - start) / ((end - start) or 1.0) * width for at in along]
    top = [(high - row["y"]) / ((high - low) or 1.0) * PARETO_HEIGHT for row in rows]
    taken = [(x - 5, x + 5, y - 5, y + 5) for x, y in zip(left, top, strict=True)]  # by points, then by names
    found = []
    for n in sorted(range(len(rows)), key=lambda n: rows[n]["front"] != "yes"):
        size = LETTER_WIDTH * len(rows[n]["name"])
        for align in ("left", "right"):
            begin = left[n] + NAME_GAP if align == "left" else left[n] - NAME_GAP - size
            box = (begin, begin + size, top[n] - 17, top[n] - 3)
            others = (other for m, other in enumerate(taken) if m != n)
            is_free = not any(box[0] < e and b < box[1] and box[2] < d and u < box[3] for b, e, u, d in others)
            if is_free and begin >= 0 and box[1] <= width:
                taken.append(box)
                found.append(rows[n] | {"align": align})
                break
    return found


def chart_config() -> dict[str, Any]:
    """Configuration of every figure: colours of the page, sizes of text, no overlapping tick labels."""
    axis = {
        "labelColor": INK, "titleColor": INK, "gridColor": FAINT, "domainColor": FAINT, "tickColor": FAINT,
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 240,
        "labelOverlap": "greedy", "labelSeparation": LABEL_GAP, "labelFlush": False, "labelExpr": ZERO_LABEL,
    }  # fmt: skip
    return {
        "background": "transparent", "font": "sans-serif", "axis": axis, "axisY": {"grid": False},
        "axisX": {"labelPadding": 4}, "padding": {"left": 36, "right": 20, "top": 4, "bottom": 4},
        "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "labelLimit": 260, "columnPadding": 40},
        "view": {"stroke": None}, "text": {"fontSize": 12},
    }  # fmt: skip


# --- files ---


SCALE = 2.0
"""Pixels of a PNG for one of the figure."""


def write_figures(figures: Iterable[tuple[str, Any]], *, folder: Path, form: str) -> list[Path]:
    """Write each (name, Altair chart) as `svg` or `png`.

    Raises InputError without vl-convert, or where the folder cannot be written.
    """
    if find_spec(DRAWS) is None:
        raise InputError(f"there is no figure: {HOW_TO_DRAW}", hint="pip install vl-convert-python")
    import vl_convert

    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in figures:
            spec = chart.properties(title=name).configure(**{**chart_config(), "background": "white"}).to_dict()
            path = folder / f"{len(written) + 1:02}-{file_name(name)}.{form}"
            if form == "png":
                write_atomically(path, vl_convert.vegalite_to_png(_printable(spec), scale=SCALE))
            else:
                write_atomically(path, vl_convert.vegalite_to_svg(_printable(spec)))
            written.append(path)
    except OSError as error:
        raise InputError(f"figures cannot be written: {error.strerror}", got=str(folder)) from None
    return written


def file_name(title: str) -> str:
    """
    >>> file_name("Throughput, A against B (8 GPUs)")
    'throughput-a-against-b-8-gpus'
    """
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")[:60].rstrip("-")
