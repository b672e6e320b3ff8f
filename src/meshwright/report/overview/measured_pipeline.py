"""The passes of a pipeline as a profiled training measured them: a timeline, and times by stage.

The files are `profile/passes-N.json` of the native engine, one for each pipeline rank. A pass begins with its wait for
the activations or gradients of another rank, `wait_s`, and then computes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.report.quantities import percent, seconds
from meshwright.report.text_table import TextTable
from meshwright.report.timeline_blocks import Blocks, blocks_svg, windows

KINDS = {
    "F": ("forward", "#3f78b5"), "B": ("backward", "#d98a35"), "I": ("backward, inputs", "#d98a35"),
    "W": ("backward, weights", "#4c9a6a"),
}  # fmt: skip
WAITING = ("waiting for another rank", "#c9ced6")
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
    wait_s: float | None  # None: the file does not tell it from computing

    @property
    def computing_from_s(self) -> float:
        """End of the wait."""
        return self.start_s + (self.wait_s or 0.0)

    @property
    def computing_s(self) -> float:
        """Time without the wait."""
        return self.end_s - self.computing_from_s


def measured_passes(folder: Path) -> tuple[MeasuredPass, ...]:
    """Passes of all ranks of a training; none where it was not profiled or has no pipeline.

    Raises InputError with file and field for a damaged file.
    """
    found: list[MeasuredPass] = []
    for path in _files(folder / "profile"):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rank, passes = document["pipeline_rank"], document["passes"]
            found += [_pass(rank, p) for p in passes[:MOST_PASSES]]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}: holds no passes ({type(error).__name__}: {error})") from None
    return tuple(found)


def _files(profile: Path) -> list[Path]:
    try:
        return sorted(path for path in profile.iterdir() if path.match("passes-*.json"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pass(rank: Any, given: dict[str, Any]) -> MeasuredPass:
    numbers = [given["stage"], given["micro_batch"], rank]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 10**6 for n in numbers):
        raise ValueError(f"stage, micro_batch and pipeline_rank are {numbers}")
    start, end = float(given["start_s"]), float(given["end_s"])
    if given["kind"] not in KINDS or not 0 <= start <= end < math.inf:
        raise ValueError(f"a pass of kind {given['kind']!r} from {start} to {end} s")
    wait = None if given.get("wait_s") is None else float(given["wait_s"])
    if not 0 <= (wait or 0.0) <= (end - start) * (1 + 1e-9) + 1e-9:
        raise ValueError(f"wait_s is {wait} in a pass of {end - start} s")
    return MeasuredPass(
        pipeline_rank=rank, stage=given["stage"], kind=given["kind"], micro_batch=given["micro_batch"],
        start_s=start, end_s=end, wait_s=wait,
    )  # fmt: skip


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
            (stage, rank, KINDS[kind][0], len(found), seconds(median(times)), seconds(max(times)),
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
    """One row a rank, one block a pass; of many passes the first and the last, as `drawn_windows` says."""
    ranks = sorted({p.pipeline_rank for p in passes})
    begin = min(p.start_s for p in passes)
    colors: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for p in passes:
        row = ranks.index(p.pipeline_rank)
        colors[KINDS[p.kind][1]].append((row, p.computing_from_s - begin, p.end_s - begin))
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
    kinds = tuple(KINDS[kind] for kind in KINDS if any(p.kind == kind for p in passes))
    return (*kinds, WAITING) if any(p.wait_s for p in passes) else kinds
