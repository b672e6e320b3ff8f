"""The pipeline of one step as inline SVG."""

from __future__ import annotations

import numpy as np

from meshwright.answers.quantities import seconds
from meshwright.cost.pipeline.orders import OpKind
from meshwright.cost.pipeline.simulate import Timeline
from meshwright.report import timeline_blocks
from meshwright.report.charts import BLUE, GREEN, ORANGE, PURPLE
from meshwright.report.timeline_blocks import Blocks, blocks_svg

COLORS = {
    OpKind.FORWARD: ("forward", BLUE),
    OpKind.BACKWARD_INPUT: ("backward, inputs", ORANGE),
    OpKind.BACKWARD_WEIGHT: ("backward, weights", GREEN),
    OpKind.BACKWARD: ("backward", ORANGE),
}
PAIR_COLOR = ("forward and backward overlapped", PURPLE)


def windows(timeline: Timeline) -> list[tuple[float, float]]:
    """The intervals that are drawn: the whole step, or its beginning and its end."""
    per_rank = timeline.graph.num_ops / timeline.graph.shape.num_ranks
    return timeline_blocks.windows(blocks_per_rank=per_rank, end_s=timeline.step_s)


def timeline_svg(timeline: Timeline) -> str:
    """The SVG text: one row a rank, one block an operation. Colours are fixed; text takes the page's colours."""
    num_ranks = timeline.graph.shape.num_ranks
    return blocks_svg(
        _blocks(timeline), ranks=range(num_ranks), drawn=windows(timeline),
        title=f"Pipeline timeline of {num_ranks} ranks over {seconds(timeline.step_s)}",
    )  # fmt: skip


def legend(timeline: Timeline) -> list[tuple[str, str]]:
    """(name, colour) of every kind of block that `timeline` holds."""
    present = [COLORS[kind] for kind in OpKind if bool(np.any(timeline.graph.kind == kind))]
    return present + ([PAIR_COLOR] if len(timeline.graph.pair_forward) else [])


def _blocks(timeline: Timeline) -> dict[str, Blocks]:
    """Operations by colour; both operations of a pair are one block."""
    graph = timeline.graph
    paired = np.zeros(graph.num_ops, dtype=bool)
    paired[graph.pair_backward] = True
    shown = np.ones(graph.num_ops, dtype=bool)
    shown[graph.pair_forward] = False
    chosen: dict[str, np.ndarray] = {}
    for kind in OpKind:
        color = COLORS[kind][1]
        chosen[color] = chosen.get(color, False) | ((graph.kind == kind) & ~paired)
    chosen[PAIR_COLOR[1]] = paired
    return {
        color: Blocks(
            row=graph.rank[which & shown], start_s=timeline.start_s[which & shown], end_s=timeline.end_s[which & shown]
        )
        for color, which in chosen.items()
    }  # fmt: skip
