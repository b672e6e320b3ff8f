"""Orders against the drawings of the papers, written out by hand for small cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.pipeline.orders import OpKind, OrderPhase, RankOrder, Slot, interleaved_group, one_stage, unrolled
from meshwright.cost.pipeline.schedules import (
    SCHEDULE_RECORDS,
    PipelineShape,
    column_of,
    rank_orders,
    schedule_shortfall,
    schedules_with,
)
from meshwright.specs.plan import SCHEDULES, Schedule

LETTERS = {OpKind.FORWARD: "F", OpKind.BACKWARD_INPUT: "B", OpKind.BACKWARD_WEIGHT: "W", OpKind.BACKWARD: "D"}


def shape(schedule: str, p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(schedule=Schedule(schedule), num_ranks=p, num_chunks=v, num_micro_batches=m)


def written(schedule: str, p: int, v: int, m: int, *, with_chunk: bool = False) -> list[str]:
    """One line a rank: F0 is the forward of micro-batch 0; F0a of its chunk 0 and F0b of its chunk 1."""
    lines = []
    for rank, order in enumerate(rank_orders(shape(schedule, p, v, m))):
        chunks = shape(schedule, p, v, m).stages_of(rank)
        words = []
        for kind, micro_batch, stage in zip(order.kind, order.micro_batch, order.stage, strict=True):
            suffix = "abcd"[chunks.index(stage)] if with_chunk else ""
            words.append(f"{LETTERS[OpKind(kind)]}{micro_batch}{suffix}")
        lines.append(" ".join(words))
    return lines


def test_gpipe_runs_all_forwards_first():
    assert written("gpipe", 2, 1, 3) == ["F0 F1 F2 D0 D1 D2"] * 2


def test_1f1b_warms_up_by_the_distance_to_the_last_rank():
    assert written("1f1b", 3, 1, 4) == ["F0 F1 F2 D0 F3 D1 D2 D3", "F0 F1 D0 F2 D1 F3 D2 D3", "F0 D0 F1 D1 F2 D2 F3 D3"]


def test_1f1b_with_fewer_micro_batches_than_ranks():
    assert written("1f1b", 3, 1, 1) == ["F0 D0"] * 3


def test_interleaved_takes_turns_of_p_micro_batches():
    assert written("interleaved", 2, 2, 4, with_chunk=True) == [
        "F0a F1a F0b F1b F2a D0b F3a D1b F2b D0a F3b D1a D2b D3b D2a D3a",
        "F0a F1a F0b D0b F1b D1b F2a D0a F3a D1a F2b D2b F3b D3b D2a D3a",
    ]


def test_zb_h1_puts_off_weight_gradients_by_the_rank():
    assert written("zero_bubble", 3, 1, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_zb_h1_with_fewer_micro_batches_than_ranks():
    assert written("zero_bubble", 3, 1, 2) == ["F0 F1 B0 W0 B1 W1", "F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"]


def test_zbv_goes_down_and_up_again():
    assert written("zbv", 2, 2, 3, with_chunk=True) == [
        "F0a F1a F2a F0b B0b W0b F1b B1b W1b B0a W0a F2b B2b W2b B1a W1a B2a W2a",
        "F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b B1a B2b B2a W1a W2a W2b",
    ]
    assert [shape("zbv", 3, 2, 9).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_dualpipe_feeds_both_ends():
    assert written("dualpipe", 4, 1, 8, with_chunk=True) == [
        "F0a F1a F2a F4b B4b W4b F5b F3a D5b F6b D0a D6b F7b D1a D7b B2a W2a B3a W3a",
        "F0a F4b F1a F5b F2a D4b F6b D0a F3a D5b F7b D1a D6b D2a B7b B3a W7b W3a",
        "F4b F0a F5b F1a F6b D0a F2a D4b F7b D1a F3a D5b D2a D6b B3a B7b W3a W7b",
        "F4b F5b F6b F0a B0a W0a F1a F7b D1a F2a D4b D2a F3a D5b D3a B6b W6b B7b W7b",
    ]
    assert [shape("dualpipe", 4, 1, 8).stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_dualpipe_overlaps_a_forward_with_a_backward_of_the_other_direction():
    for order in rank_orders(shape("dualpipe", 6, 1, 16)):
        backward = order.is_paired.nonzero()[0]
        assert len(backward) > 0
        assert set(order.kind[backward]) == {OpKind.BACKWARD}
        assert set(order.kind[backward - 1]) == {OpKind.FORWARD}
        came_from_rank_0 = order.micro_batch < 8
        assert (came_from_rank_0[backward] != came_from_rank_0[backward - 1]).all()


def test_only_dualpipe_overlaps_pairs():
    for name, v in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)]:
        assert not any(order.is_paired.any() for order in rank_orders(shape(name, 3, v, 6)))


@pytest.mark.parametrize(("m", "group"), [(3, 3), (4, 4), (8, 4), (9, 5), (10, 5), (11, 6), (13, 7)])
def test_groups_of_interleaved_micro_batches(m, group):
    assert interleaved_group(4, m) == group
    assert m % group == 0 or m % group >= 4


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "words"),
    [
        ("1f1b", 4, 2, 8, "1 chunk"),
        ("gpipe", 0, 1, 8, "at least 1"),
        ("1f1b", 4, 1, 0, "at least 1"),
        ("interleaved", 4, 1, 8, "2 or more chunks"),
        ("interleaved", 1, 2, 8, "2 pipeline ranks"),
        ("zero_bubble", 4, 2, 8, "1 chunk"),
        ("zbv", 4, 1, 8, "exactly 2 chunks"),
        ("zbv", 4, 2, 6, "needs 7 micro-batches"),
        ("dualpipe", 3, 1, 8, "even number of ranks"),
        ("dualpipe", 4, 1, 9, "even number, not 9"),
        ("dualpipe", 4, 1, 6, "8 micro-batches on 4 ranks, there are 6"),
    ],
)
def test_an_illegal_shape_has_a_reason(schedule, p, v, m, words):
    assert words in (schedule_shortfall(shape(schedule, p, v, m)) or "")


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m"),
    [
        ("gpipe", 1, 1, 1),
        ("1f1b", 1, 1, 4),
        ("interleaved", 8, 4, 3),
        ("zero_bubble", 4, 1, 1),
        ("zbv", 4, 2, 7),
        ("dualpipe", 4, 1, 8),
    ],
)
def test_a_legal_shape_has_none(schedule, p, v, m):
    assert schedule_shortfall(shape(schedule, p, v, m)) is None


def test_every_schedule_has_a_record_whose_counts_agree_with_the_rules():
    assert tuple(SCHEDULE_RECORDS) == tuple(Schedule)
    for schedule, record in SCHEDULE_RECORDS.items():
        least = record.min_micro_batches(4)
        legal = shape(schedule.value, 4, record.min_chunks, max(least, 1))
        assert schedule_shortfall(legal) is None
        if least > 1:
            assert schedule_shortfall(shape(schedule.value, 4, record.min_chunks, least - 1)) is not None


def test_a_record_says_what_its_order_does():
    for schedule, record in SCHEDULE_RECORDS.items():
        some = shape(schedule.value, 4, record.min_chunks, 8)
        kinds = {OpKind(kind) for order in rank_orders(some) for kind in order.kind}
        assert record.splits_backward is (OpKind.BACKWARD_WEIGHT in kinds)
        assert len({stage for rank in range(4) for stage in some.stages_of(rank)}) == some.num_stages


def test_whoever_asks_the_record_follows_a_new_one(monkeypatch):
    """GPipe that puts its weight gradients off, by its record alone: order, simulation and memory follow."""

    def late_weights(shape: PipelineShape, rank: int) -> RankOrder:
        kinds = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
        phases = [OrderPhase((Slot(kind, i),), shape.num_micro_batches) for i, kind in enumerate(kinds)]
        return unrolled([one_stage(rank, shape.num_micro_batches)] * 3, phases)

    old = SCHEDULE_RECORDS[Schedule.GPIPE]
    new = replace(old, order=late_weights, splits_backward=True, min_chunks=1, max_chunks=1)
    monkeypatch.setitem(SCHEDULE_RECORDS, Schedule.GPIPE, new)
    assert written("gpipe", 2, 1, 2) == ["F0 F1 B0 B1 W0 W1"] * 2
    assert Schedule.GPIPE in schedules_with(lambda record: record.splits_backward)
    assert column_of(lambda record: record.splits_backward, SCHEDULES.index(Schedule.GPIPE))
