"""Pipeline schedules: one record each, and the shape of a pipeline that runs one.

Whoever needs to know something about a schedule asks its record: the planner's rules, the memory model, the run
file, the engines. `orders` says which operation each rank runs next, `formulas` how long ranks wait and how many
micro-batches are in flight. docs/guides/adding-a-schedule.md shows how to add one.

Symbols: p ranks, v model chunks per rank, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array
from meshwright.cost.pipeline import formulas, orders
from meshwright.cost.pipeline.orders import RankOrder
from meshwright.errors import InputError
from meshwright.specs.plan import SCHEDULES, Plan, Schedule


class Placement(Enum):
    """Placement of a model's stages on the ranks."""

    LOOP = "loop"  # chunk c of rank r is stage c p + r
    V = "v"  # down the ranks and up again: rank 0 has the first and the last stage
    MIRRORED = "mirrored"  # two copies of the model, fed from either end: rank r has stage r and stage p - 1 - r


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord:
    """Everything that tells one schedule from the others.

    `order(shape, rank)` builds the order of one rank, `waiting_s` and `in_flight` are its closed forms. At least
    `micro_batches_per_rank` x p + `extra_micro_batches` micro-batches fill it.
    """

    order: Callable[[PipelineShape, int], RankOrder]
    waiting_s: Callable[..., Array]  # (p, v, m, F, B, W, x, s), see `formulas`
    in_flight: Callable[..., Array]  # (p, v, m, rank)
    min_chunks: int = 1  # per rank
    max_chunks: int | None = 1  # None: any number
    placement: Placement = Placement.LOOP
    splits_backward: bool = False  # weight gradients are operations of their own
    overlaps_pairs: bool = False  # forward passes run with backward passes of other micro-batches, all-to-alls hidden
    runs_on_one_rank: bool = False  # also without a pipeline
    in_rounds: bool = False  # chunks take turns of p micro-batches, which some engines want full
    needs_even_counts: bool = False  # of ranks and of micro-batches
    micro_batches_per_rank: int = 0
    extra_micro_batches: int = 1
    dominated_by: Schedule | None = None  # which takes as long and keeps fewer activations

    def min_micro_batches(self, num_ranks: int) -> int:
        """Fewest micro-batches per step and pipeline."""
        return self.micro_batches_per_rank * num_ranks + self.extra_micro_batches

    @property
    def stages_held(self) -> int:
        """Copies of the weights of a rank's share of the model."""
        return 2 if self.placement is Placement.MIRRORED else 1

    def allows_chunks(self, num_chunks: int) -> bool:
        """True if a rank may have this many."""
        return self.min_chunks <= num_chunks and (self.max_chunks is None or num_chunks <= self.max_chunks)

    @property
    def chunks_allowed(self) -> str:
        """In messages: "exactly 1", "2 or more"."""
        return f"{self.min_chunks} or more" if self.max_chunks is None else f"exactly {self.max_chunks}"


SCHEDULE_RECORDS: dict[Schedule, ScheduleRecord] = {
    Schedule.GPIPE: ScheduleRecord(
        order=orders.gpipe,
        waiting_s=formulas.gpipe_waiting_s,
        in_flight=formulas.gpipe_in_flight,
        runs_on_one_rank=True,
        dominated_by=Schedule.ONE_F_ONE_B,
    ),
    Schedule.ONE_F_ONE_B: ScheduleRecord(
        order=orders.one_f_one_b,
        waiting_s=formulas.one_f_one_b_waiting_s,
        in_flight=formulas.one_f_one_b_in_flight,
        runs_on_one_rank=True,
    ),
    Schedule.INTERLEAVED: ScheduleRecord(
        order=orders.interleaved,
        waiting_s=formulas.interleaved_waiting_s,
        in_flight=formulas.interleaved_in_flight,
        min_chunks=2,
        max_chunks=None,
        in_rounds=True,
    ),
    Schedule.ZERO_BUBBLE: ScheduleRecord(
        order=orders.zero_bubble,
        waiting_s=formulas.zero_bubble_waiting_s,
        in_flight=formulas.zero_bubble_in_flight,
        splits_backward=True,
    ),
    Schedule.ZBV: ScheduleRecord(
        order=orders.zbv,
        waiting_s=formulas.zbv_waiting_s,
        in_flight=formulas.zero_bubble_in_flight,
        min_chunks=2,
        max_chunks=2,
        placement=Placement.V,
        splits_backward=True,
        micro_batches_per_rank=2,
        extra_micro_batches=-1,
    ),
    Schedule.DUALPIPE: ScheduleRecord(
        order=orders.dualpipe,
        waiting_s=formulas.dualpipe_waiting_s,
        in_flight=formulas.dualpipe_in_flight,
        placement=Placement.MIRRORED,
        splits_backward=True,
        overlaps_pairs=True,
        needs_even_counts=True,
        micro_batches_per_rank=2,
        extra_micro_batches=0,
    ),
    Schedule.DUALPIPE_V: ScheduleRecord(
        order=orders.dualpipe_v,
        waiting_s=formulas.dualpipe_v_waiting_s,
        in_flight=formulas.dualpipe_v_in_flight,
        min_chunks=2,
        max_chunks=2,
        placement=Placement.V,
        splits_backward=True,
        overlaps_pairs=True,
        micro_batches_per_rank=2,
        extra_micro_batches=0,
    ),
}


def schedules_with(trait: Callable[[ScheduleRecord], bool]) -> tuple[Schedule, ...]:
    """The schedules whose record has `trait`.

    >>> [s.value for s in schedules_with(lambda record: record.splits_backward)]
    ['zero_bubble', 'zbv', 'dualpipe', 'dualpipev']
    """
    return tuple(schedule for schedule, record in SCHEDULE_RECORDS.items() if trait(record))


def chunks_allowed(num_chunks: Array, schedule: Array) -> NDArray[np.bool_]:
    """True where a rank may have `num_chunks` under the row's schedule."""
    most = column_of(lambda record: np.inf if record.max_chunks is None else record.max_chunks, schedule)
    return (num_chunks >= column_of(lambda record: record.min_chunks, schedule)) & (num_chunks <= most)


def column_of(trait: Callable[[ScheduleRecord], Any], schedule: Array) -> NDArray[Any]:
    """`trait` of every row's schedule; `schedule` holds indices into `SCHEDULES`."""
    return np.array([trait(SCHEDULE_RECORDS[s]) for s in SCHEDULES])[np.asarray(schedule)]


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Everything the order of operations depends on. Hashable: graphs are cached by it."""

    schedule: Schedule
    num_ranks: int  # p
    num_chunks: int = 1  # v, per rank
    num_micro_batches: int  # m, per optimizer step and pipeline

    @property
    def record(self) -> ScheduleRecord:
        return SCHEDULE_RECORDS[self.schedule]

    @property
    def num_stages(self) -> int:
        """Stages of the model. A mirrored schedule holds every stage on two ranks, so it has p of them, not 2p."""
        return self.num_ranks * self.num_chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, chunk 0 first."""
        p = self.num_ranks
        match self.record.placement:
            case Placement.V:
                return (rank, 2 * p - 1 - rank)
            case Placement.MIRRORED:
                return (rank, p - 1 - rank)  # of the copy fed from rank 0 and of the one fed from rank p - 1
            case Placement.LOOP:
                return tuple(chunk * p + rank for chunk in range(self.num_chunks))

    @property
    def hop_crosses(self) -> NDArray[np.bool_]:
        """[num_stages], True where stage s and s + 1 are on different ranks; the last entry is False."""
        crosses = np.full(self.num_stages, self.num_ranks > 1)
        crosses[-1] = False
        if self.record.placement is Placement.V:
            crosses[self.num_ranks - 1] = False  # the foot of the V
        return crosses


def shape_of(plan: Plan, *, num_micro_batches: int = 1) -> PipelineShape:
    """The shape of `plan`. Without a pipeline the schedule has no meaning."""
    return PipelineShape(
        schedule=plan.schedule if plan.pipeline > 1 else Schedule.ONE_F_ONE_B,
        num_ranks=plan.pipeline,
        num_chunks=plan.virtual_pipeline,
        num_micro_batches=num_micro_batches,
    )


def rank_layers(shape: PipelineShape, layers_per_stage: tuple[int, ...]) -> tuple[int, int, int]:
    """(first rank, fullest rank between, last rank): layers of all stages that each holds.

    Without a rank between, the middle is the fuller of the two. Raises InputError unless every stage has its number.
    """
    if len(layers_per_stage) != shape.num_stages:
        raise InputError(
            f"layers_per_stage must have one value for each of {shape.num_stages} stages", got=len(layers_per_stage)
        )
    ranks = [sum(layers_per_stage[stage] for stage in shape.stages_of(rank)) for rank in range(shape.num_ranks)]
    return ranks[0], max(ranks[1:-1] or ranks), ranks[-1]


def usual_schedule(virtual_pipeline: int) -> Schedule:
    """The schedule that a number of virtual stages stands for where none is named."""
    return Schedule.INTERLEAVED if virtual_pipeline > 1 else Schedule.ONE_F_ONE_B


def schedule_shortfall(shape: PipelineShape) -> str | None:
    """The reason why the schedule cannot run with these counts, or None when it can."""
    p, v, m = shape.num_ranks, shape.num_chunks, shape.num_micro_batches
    name, record = shape.schedule.value, shape.record
    if min(p, v, m) < 1:
        return f"{name}: ranks, chunks and micro-batches must be at least 1"
    if p == 1 and not record.runs_on_one_rank:
        return f"{name} needs at least 2 pipeline ranks, there is 1"
    if not record.allows_chunks(v):
        chunks = record.chunks_allowed + (" chunk" if record.max_chunks == 1 else " chunks")
        return f"{name} has {chunks} per rank, not {v}"
    if record.needs_even_counts and p % 2:
        return f"{name} pairs ranks and needs an even number of ranks, not {p}"
    if record.needs_even_counts and m % 2:
        return f"{name} feeds half of the micro-batches from either end and needs an even number, not {m}"
    if m < record.min_micro_batches(p):
        return f"{name} needs {record.min_micro_batches(p)} micro-batches on {p} ranks, there are {m}"
    return None


def rank_orders(shape: PipelineShape) -> list[RankOrder]:
    """The order of operations of every rank. `shape` is legal (`schedule_shortfall` says None)."""
    return [shape.record.order(shape, rank) for rank in range(shape.num_ranks)]
