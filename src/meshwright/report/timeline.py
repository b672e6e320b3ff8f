"""The pipeline of one step as it is drawn: scaled to the estimated step, with what follows it.

The event graph runs on kernel times before calibrated factors; the drawn timeline is scaled to the
estimated step; gradient reduction, optimizer and the other components follow it.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from itertools import pairwise

import numpy as np

from meshwright.cost.pipeline.orders import OpKind
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.cost.step import StepTable
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.finalists import MAX_OPERATIONS, OUTSIDE_PIPELINE
from meshwright.report.components import label
from meshwright.report.quantities import seconds
from meshwright.report.trace import Track, TrackSpan
from meshwright.specs.plan import Schedule

AFTER_PIPELINE = tuple(name for name in OUTSIDE_PIPELINE if name != "bubble")

COLORS = {
    OpKind.FORWARD: ("forward", "#3f78b5"),
    OpKind.BACKWARD_INPUT: ("backward, inputs", "#d98a35"),
    OpKind.BACKWARD_WEIGHT: ("backward, weights", "#4c9a6a"),
    OpKind.BACKWARD: ("backward", "#d98a35"),
}
PAIR_COLOR = ("forward and backward overlapped", "#8b6bb1")

MAX_DRAWN_PER_RANK = 160
"""Of longer pipelines only the fill and the drain are drawn: between, the pattern repeats."""

WIDTH, MAX_HEIGHT, LABEL_WIDTH, AXIS_HEIGHT, GAP = 960, 620, 64, 26, 28


def step_timeline(estimate: PlanEstimate) -> Timeline | None:
    """The estimated pipeline, one rank when there is none; None when it is too long to be simulated."""
    timeline = estimate.timeline or _one_rank(estimate.steps)
    if timeline is None or timeline.step_s <= 0:
        return None
    factor = pipeline_s(estimate) / timeline.step_s
    return replace(
        timeline,
        start_s=timeline.start_s * factor,
        end_s=timeline.end_s * factor,
        step_s=timeline.step_s * factor,
        busy_s=timeline.busy_s * factor,
    )


def pipeline_s(estimate: PlanEstimate) -> float:
    """Seconds from the first forward pass to the last backward pass."""
    components = estimate.step.components_s
    return estimate.step.step.value - sum(components.get(name, 0.0) for name in AFTER_PIPELINE)


def after_pipeline(estimate: PlanEstimate) -> tuple[Track, ...]:
    """Components after the pipeline until the step ends, one track each."""
    now, tracks = pipeline_s(estimate), []
    for name in AFTER_PIPELINE:
        length = estimate.step.components_s.get(name, 0.0)
        if length > 0:
            tracks.append(
                Track(name=label(name), spans=(TrackSpan(name=label(name), start_s=now, end_s=now + length),))
            )
            now += length
    return tuple(tracks)


def _one_rank(steps: StepTable) -> Timeline | None:
    num_micro = round(float(np.ravel(steps.num_micro_batches)[0]))
    shape = PipelineShape(schedule=Schedule.ONE_F_ONE_B, num_ranks=1, num_micro_batches=num_micro)
    if 2 * num_micro > MAX_OPERATIONS or np.ravel(steps.stages.first.forward_s).size != 1:
        return None
    first = steps.stages.first
    times = (float(np.ravel(x)[0]) for x in (first.forward_s, first.input_s, first.weight_s))
    forward, inputs, weights = times
    return simulate(shape, StageTimes(forward_s=forward, backward_input_s=inputs, backward_weight_s=weights))


# --- drawing ---


def windows(timeline: Timeline) -> list[tuple[float, float]]:
    """The intervals that are drawn: the whole step, or its beginning and its end."""
    per_rank = timeline.graph.num_ops / timeline.graph.shape.num_ranks
    if per_rank <= MAX_DRAWN_PER_RANK:
        return [(0.0, timeline.step_s)]
    length = timeline.step_s * MAX_DRAWN_PER_RANK / per_rank / 2
    return [(0.0, length), (timeline.step_s - length, timeline.step_s)]


def timeline_svg(timeline: Timeline) -> str:
    """One row a rank, one block an operation. Colours are fixed; text takes those of the page."""
    num_ranks = timeline.graph.shape.num_ranks
    row = min(22.0, (MAX_HEIGHT - AXIS_HEIGHT) / num_ranks)
    height = row * num_ranks + AXIS_HEIGHT
    drawn = windows(timeline)
    width = (WIDTH - LABEL_WIDTH - GAP * (len(drawn) - 1)) / len(drawn)
    parts = [_rank_labels(num_ranks, row)]
    for i, window in enumerate(drawn):
        left = LABEL_WIDTH + i * (width + GAP)
        parts += [_blocks(timeline, window, left, width, row), _axis(window, left, width, height)]
    for _ in pairwise(drawn):
        middle = LABEL_WIDTH + width + GAP / 2
        parts.append(f'<text x="{middle:.0f}" y="{row * num_ranks / 2:.0f}" text-anchor="middle">⋯</text>')
    text = f"Pipeline timeline of {num_ranks} ranks over {seconds(timeline.step_s)}"
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(text)}">'
        f"{''.join(parts)}</svg>"
    )


def legend(timeline: Timeline) -> list[tuple[str, str]]:
    """(name, colour) of every kind of block that `timeline` holds."""
    present = [COLORS[kind] for kind in OpKind if bool(np.any(timeline.graph.kind == kind))]
    return present + ([PAIR_COLOR] if len(timeline.graph.pair_forward) else [])


def _blocks(timeline: Timeline, window: tuple[float, float], left: float, width: float, row: float) -> str:
    """One path per colour: thousands of blocks in some kilobytes."""
    graph, (begin, end) = timeline.graph, window
    scale = width / (end - begin)
    start = np.clip(timeline.start_s, begin, end)
    stop = np.clip(timeline.end_s, begin, end)
    shown = stop > start
    paired = np.zeros(graph.num_ops, dtype=bool)
    paired[graph.pair_backward] = True
    shown[graph.pair_forward] = False
    inset = min(1.0, row / 8)
    paths = []
    groups = [(COLORS[kind][1], (graph.kind == kind) & ~paired) for kind in OpKind]
    for color, chosen in [*groups, (PAIR_COLOR[1], paired)]:
        index = np.flatnonzero(chosen & shown)
        x = left + (start[index] - begin) * scale
        w = np.maximum((stop[index] - start[index]) * scale - 0.3, 0.2)  # a hairline between neighbours
        y = graph.rank[index] * row + inset
        if len(index):
            h = row - 2 * inset
            blocks = (f"M{a:.1f} {b:.1f}h{c:.1f}v{h:.1f}h-{c:.1f}z" for a, b, c in zip(x, y, w, strict=True))
            paths.append(f'<path fill="{color}" d="{"".join(blocks)}"/>')
    return "".join(paths)


def _rank_labels(num_ranks: int, row: float) -> str:
    every = max(1, -(-12 // max(1, int(row))))
    return "".join(
        f'<text x="{LABEL_WIDTH - 8}" y="{(rank + 0.5) * row + 4:.1f}" text-anchor="end">rank {rank}</text>'
        for rank in range(0, num_ranks, every)
    )


def _axis(window: tuple[float, float], left: float, width: float, height: float) -> str:
    begin, end = window
    ends = ((left, begin, "start"), (left + width, end, "end"))
    return "".join(
        f'<text x="{x:.0f}" y="{height - 6:.0f}" text-anchor="{anchor}">{seconds(t) if t else "0"}</text>'
        for x, t, anchor in ends
    )
