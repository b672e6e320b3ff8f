"""A timeline as inline SVG: one row a rank, one block an operation.

It is drawn twice: for wide windows and paper, and for phones, where a window of time continues on further lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.answers.quantities import seconds

MAX_DRAWN_PER_RANK = 160
"""Blocks of a rank. Longer pipelines show only the fill and the drain: the pattern between them repeats."""

AXIS_HEIGHT, ROW, GAP = 26, 22.0, 28
"""Pixels of the line of times below the rows, of one row at most, and between two windows."""


@dataclass(frozen=True, kw_only=True)
class _Format:
    """Pixels of a drawing, and of all rows of one line. One line of a phone has room for `most_blocks`."""

    css_class: str
    width: int
    label_width: int
    rows_height: int
    most_blocks: int | None = None
    most_lines: int = 1


WIDE = _Format(css_class="timeline for-wide", width=960, label_width=84, rows_height=594)
NARROW = _Format(
    css_class="timeline for-narrow", width=350, label_width=52, rows_height=420, most_blocks=40, most_lines=4
)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Operations of one colour: row, and seconds of begin and end of each."""

    row: NDArray[np.integer]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One window of time at one place of the drawing."""

    window: tuple[float, float]
    left: float
    top: float
    width: float


def windows(*, blocks_per_rank: float, end_s: float) -> list[tuple[float, float]]:
    """The intervals that are drawn: the whole step, or its beginning and its end."""
    if blocks_per_rank <= MAX_DRAWN_PER_RANK:
        return [(0.0, end_s)]
    length = end_s * MAX_DRAWN_PER_RANK / blocks_per_rank / 2
    return [(0.0, length), (end_s - length, end_s)]


def blocks_svg(
    by_color: Mapping[str, Blocks], *, ranks: Sequence[int], drawn: Sequence[tuple[float, float]], title: str
) -> str:
    """The SVG text of the windows `drawn`. `title` is for screen readers."""
    wide = _drawing(by_color, ranks, drawn, title, WIDE, hidden="")
    return wide + _drawing(by_color, ranks, drawn, title, NARROW, hidden=' style="display:none"')


def _drawing(
    by_color: Mapping[str, Blocks],
    ranks: Sequence[int],
    drawn: Sequence[tuple[float, float]],
    title: str,
    form: _Format,
    *,
    hidden: str,
) -> str:
    row = min(ROW, form.rows_height / len(ranks))
    height = row * len(ranks) + AXIS_HEIGHT
    panels = _panels(by_color, drawn, len(ranks), form, height)
    parts = [_rank_labels(ranks, row, top, form) for top in dict.fromkeys(p.top for p in panels)]
    for panel in panels:
        parts += [_paths(by_color, panel, row), _times(panel, height)]
    parts += [
        f'<text x="{p.left - GAP / 2:.0f}" y="{p.top + row * len(ranks) / 2:.0f}" text-anchor="middle">⋯</text>'
        for p in panels
        if p.left > form.label_width
    ]
    whole = max(p.top for p in panels) + height
    return (
        f'<svg class="{form.css_class}" viewBox="0 0 {form.width} {whole:.0f}" role="img" '
        f'aria-label="{escape(title, quote=True)}"{hidden}>{"".join(parts)}</svg>'
    )


def _panels(
    by_color: Mapping[str, Blocks], drawn: Sequence[tuple[float, float]], num_rows: int, form: _Format, height: float
) -> list[_Panel]:
    """Windows beside each other, or each on lines of its own."""
    room = form.width - form.label_width
    if form.most_blocks is None:
        width = (room - GAP * (len(drawn) - 1)) / len(drawn)
        return [
            _Panel(window=w, left=form.label_width + i * (width + GAP), top=0.0, width=width)
            for i, w in enumerate(drawn)
        ]
    cuts = []
    for begin, end in drawn:
        inside = sum(int(np.sum((b.end_s > begin) & (b.start_s < end))) for b in by_color.values()) / num_rows
        num_lines = min(max(1, form.most_lines // len(drawn)), max(1, -int(-inside // form.most_blocks)))
        ends = np.linspace(begin, end, num_lines + 1)
        cuts += [(float(a), float(b)) for a, b in pairwise(ends)]
    return [_Panel(window=w, left=form.label_width, top=i * height, width=float(room)) for i, w in enumerate(cuts)]


def _paths(by_color: Mapping[str, Blocks], panel: _Panel, row: float) -> str:
    """One path per colour: thousands of blocks in some kilobytes."""
    begin, end = panel.window
    scale, inset, paths = panel.width / (end - begin or 1.0), min(1.0, row / 8), []
    for color, blocks in by_color.items():
        start, stop = np.clip(blocks.start_s, begin, end), np.clip(blocks.end_s, begin, end)
        shown = np.flatnonzero(stop > start)
        x = panel.left + (start[shown] - begin) * scale
        w = np.maximum((stop[shown] - start[shown]) * scale - 0.3, 0.2)  # a hairline between neighbours
        y, h = panel.top + blocks.row[shown] * row + inset, row - 2 * inset
        if len(shown):
            d = (f"M{a:.1f} {b:.1f}h{c:.1f}v{h:.1f}h-{c:.1f}z" for a, b, c in zip(x, y, w, strict=True))
            paths.append(f'<path fill="{color}" d="{"".join(d)}"/>')
    return "".join(paths)


def _rank_labels(ranks: Sequence[int], row: float, top: float, form: _Format) -> str:
    every = max(1, -(-12 // max(1, int(row))))
    return "".join(
        f'<text x="{form.label_width - 8}" y="{top + (i + 0.5) * row + 4:.1f}" text-anchor="end">rank {ranks[i]}</text>'
        for i in range(0, len(ranks), every)
    )


def _times(panel: _Panel, height: float) -> str:
    begin, end = panel.window
    ends = ((panel.left, begin, "start"), (panel.left + panel.width, end, "end"))
    return "".join(
        f'<text x="{x:.0f}" y="{panel.top + height - 8:.0f}" text-anchor="{anchor}">{seconds(t) if t else "0"}</text>'
        for x, t, anchor in ends
    )
