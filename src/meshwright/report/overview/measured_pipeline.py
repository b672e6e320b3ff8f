"""The passes of a pipeline that was measured: a timeline, and times by stage."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import numpy as np

from meshwright.answers.overview.measured_passes import KINDS, MeasuredPass
from meshwright.answers.quantities import percent, seconds
from meshwright.answers.text_table import TextTable
from meshwright.report.timeline_blocks import Blocks, blocks_svg, windows

COLORS = {"F": "#3f78b5", "B": "#d98a35", "I": "#d98a35", "W": "#4c9a6a"}
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
