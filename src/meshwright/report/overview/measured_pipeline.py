"""The passes of a pipeline as a profiled training measured them: a timeline, and times by stage.

The files are `profile/passes-N.json` of the native engine, one for each pipeline rank. A pass includes its wait for the
activations or gradients that it needs; the time between passes is idle, or sends.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import InputError
from meshwright.report.quantities import percent, seconds
from meshwright.report.text_table import TextTable

KINDS = {
    "F": ("forward", "#3f78b5"), "B": ("backward", "#d98a35"), "I": ("backward, inputs", "#d98a35"),
    "W": ("backward, weights", "#4c9a6a"),
}  # fmt: skip
WIDTH, LABEL_WIDTH, ROW, AXIS_HEIGHT = 960, 64, 22, 26
MOST_PASSES = 100_000


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One pass of one micro-batch on one stage; seconds from the begin of the step on its rank."""

    pipeline_rank: int
    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


def measured_passes(folder: Path) -> tuple[MeasuredPass, ...]:
    """Passes of all ranks of a training; none where it was not profiled or has no pipeline.

    Raises InputError with file and field for a damaged file.
    """
    found: list[MeasuredPass] = []
    for path in sorted((folder / "profile").glob("passes-*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rank, passes = document["pipeline_rank"], document["passes"]
            found += [_pass(rank, p) for p in passes[:MOST_PASSES]]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}: holds no passes ({type(error).__name__}: {error})") from None
    return tuple(found)


def _pass(rank: Any, given: dict[str, Any]) -> MeasuredPass:
    numbers = [given["stage"], given["micro_batch"], rank]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 10**6 for n in numbers):
        raise ValueError(f"stage, micro_batch and pipeline_rank are {numbers}")
    start, end = float(given["start_s"]), float(given["end_s"])
    if given["kind"] not in KINDS or not 0 <= start <= end < math.inf:
        raise ValueError(f"a pass of kind {given['kind']!r} from {start} to {end} s")
    return MeasuredPass(
        pipeline_rank=rank, stage=given["stage"], kind=given["kind"], micro_batch=given["micro_batch"],
        start_s=start, end_s=end,
    )  # fmt: skip


def stages_table(passes: tuple[MeasuredPass, ...], *, name: str) -> TextTable:
    """Median time of a pass by stage and kind, and the idle share of its rank."""
    by_stage: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for p in passes:
        by_stage[p.pipeline_rank, p.stage, p.kind].append(p.end_s - p.start_s)
    idle = idle_ratios(passes)
    return TextTable(
        title=f"Measured pipeline of {name}: data",
        headings=("stage", "rank", "pass", "n", "median", "longest", "rank idle"),
        rows=[
            (stage, rank, KINDS[kind][0], len(times), seconds(median(times)), seconds(max(times)), percent(idle[rank]))
            for (rank, stage, kind), times in sorted(by_stage.items())
        ],
        text_columns=("pass",),
    )  # fmt: skip


def idle_ratios(passes: tuple[MeasuredPass, ...]) -> dict[int, float]:
    """Share of the time between the first and the last pass of all ranks in which a rank has none."""
    begin, end = min(p.start_s for p in passes), max(p.end_s for p in passes)
    busy: dict[int, float] = defaultdict(float)
    for p in passes:
        busy[p.pipeline_rank] += p.end_s - p.start_s
    return {rank: max(0.0, 1 - s / (end - begin)) if end > begin else 0.0 for rank, s in busy.items()}


def passes_svg(passes: tuple[MeasuredPass, ...], *, name: str) -> str:
    """One row a rank, one block a pass."""
    ranks = sorted({p.pipeline_rank for p in passes})
    begin, end = min(p.start_s for p in passes), max(p.end_s for p in passes)
    scale = (WIDTH - LABEL_WIDTH) / (end - begin or 1.0)
    height = ROW * len(ranks) + AXIS_HEIGHT
    blocks: dict[str, list[str]] = defaultdict(list)
    for p in passes:
        x, w = LABEL_WIDTH + (p.start_s - begin) * scale, max((p.end_s - p.start_s) * scale - 0.3, 0.2)
        y = ranks.index(p.pipeline_rank) * ROW + 1
        blocks[KINDS[p.kind][1]].append(f"M{x:.1f} {y}h{w:.1f}v{ROW - 2}h-{w:.1f}z")
    paths = "".join(f'<path fill="{color}" d="{"".join(d)}"/>' for color, d in blocks.items())
    labels = "".join(
        f'<text x="{LABEL_WIDTH - 8}" y="{(i + 0.5) * ROW + 4:.0f}" text-anchor="end">rank {rank}</text>'
        for i, rank in enumerate(ranks)
    )
    axis = (
        f'<text x="{LABEL_WIDTH}" y="{height - 6}">0</text>'
        f'<text x="{WIDTH}" y="{height - 6}" text-anchor="end">{seconds(end - begin)}</text>'
    )
    text = escape(f"Measured passes of {name} on {len(ranks)} pipeline ranks", quote=True)
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text}">'
        f"{labels}{paths}{axis}</svg>"
    )


def passes_legend(passes: tuple[MeasuredPass, ...]) -> tuple[tuple[str, str], ...]:
    """(name, colour) of the kinds of passes."""
    return tuple(KINDS[kind] for kind in KINDS if any(p.kind == kind for p in passes))
