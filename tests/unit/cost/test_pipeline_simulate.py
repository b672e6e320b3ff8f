"""Step lengths, waiting and memory of pipelines checked by hand or against published values."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.pipeline import graph
from meshwright.cost.pipeline.orders import OpKind, RankOrder
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import Sends, StageTimes, peak_in_flight, simulate
from meshwright.specs.plan import Schedule


def shape(schedule: str, p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(schedule=Schedule(schedule), num_ranks=p, num_chunks=v, num_micro_batches=m)


def even(total_s: float, v: int = 1, **others) -> StageTimes:
    part = total_s / v
    return StageTimes(forward_s=part, backward_input_s=part, backward_weight_s=part, **others)


# F = B = W = 10 per rank and micro-batch, transfers free; made with the pipeline simulator of Primus (AMD).
GOLDEN = [
    ("1f1b", 8, 1, 64, 2130, 0.0986, 8.0),
    ("interleaved", 8, 2, 64, 2025, 0.0519, 11.5),
    ("zero_bubble", 8, 1, 64, 1990, 0.0352, 8.0),
    ("zbv", 8, 2, 64, 1955, 0.0179, 8.0),
    ("1f1b", 24, 1, 256, 8370, 0.0824, 24.0),
    # Primus says 29.75, a peak of groups of 24. A last group of 16 would deadlock, so ours are groups of 29.
    ("interleaved", 24, 4, 256, 7852.5, 0.0220, 33.5),
    ("interleaved", 24, 4, 240, 7372.5, 0.0234, 29.75),
]


@pytest.mark.parametrize(("schedule", "p", "v", "m", "step_s", "bubble", "peak"), GOLDEN)
def test_golden_steps(schedule, p, v, m, step_s, bubble, peak):
    timeline = simulate(shape(schedule, p, v, m), even(10, v))
    assert timeline.step_s == pytest.approx(step_s)
    assert timeline.bubble_ratio == pytest.approx(bubble, abs=5e-5)
    assert timeline.peak_in_flight.max() == peak


def test_dualpipe_waits_as_its_paper_says():
    """(p/2 - 1)(F&B + B - 3W) with F = 10, B = 20 of which W = 10, F&B = 30; p + 1 activations."""
    timeline = simulate(shape("dualpipe", 8, 1, 64), even(10))
    assert timeline.step_s == pytest.approx(64 * 30 + 3 * (30 + 20 - 30))
    assert timeline.peak_in_flight.tolist() == [9] * 8


def test_one_rank_does_everything_without_waiting():
    timeline = simulate(shape("1f1b", 1, 1, 4), even(10, transfer_s=5))
    assert (timeline.step_s, timeline.bubble_ratio) == (120, 0)


def test_a_slow_stage_sets_the_pace():
    times = StageTimes(forward_s=[1, 4, 2], backward_input_s=[1, 4, 2], backward_weight_s=[1, 4, 2])
    assert simulate(shape("gpipe", 3, 1, 5), times).step_s == 3 * (1 + 4 + 2) + 4 * 3 * 4
    # In 1F1B rank 1 starts at 1, works 60, waits only from 9 to 11, for the first gradient of rank 2, and its
    # own last gradient then keeps rank 0 busy for 2.
    assert simulate(shape("1f1b", 3, 1, 5), times).step_s == 1 + 60 + 2 + 2


def test_each_hop_counts_on_the_way_down_and_up():
    times = StageTimes(forward_s=1, backward_input_s=1, backward_weight_s=1, transfer_s=[0.25, 0.5, 99])
    assert simulate(shape("1f1b", 3, 1, 1), times).step_s == 9 + 2 * (0.25 + 0.5)


def test_the_foot_of_the_v_is_no_transfer():
    """p = 2: rank 1 holds stages 1 and 2, so only hops 0 and 2 cross."""
    times = even(1, transfer_s=[0, 1000, 0, 0])
    assert simulate(shape("zbv", 2, 2, 5), times).step_s == simulate(shape("zbv", 2, 2, 5), even(1)).step_s


def test_a_blocking_send_keeps_the_sender_busy():
    free = simulate(shape("gpipe", 2, 1, 3), even(1, transfer_s=0.5))
    blocked = simulate(shape("gpipe", 2, 1, 3), even(1, transfer_s=0.5, sends=Sends.BLOCKING))
    assert free.busy_s.tolist() == [9, 9]
    assert blocked.busy_s.tolist() == [9 + 3 * 0.5, 9 + 3 * 0.5]
    assert free.step_s == 12 + 2 * 0.5
    # Rank 0 has sent its activations at 4.5, rank 1 its gradients at 5.5 + 3 * 2.5, and one backward is left.
    assert blocked.step_s == 5.5 + 3 * 2.5 + 2


def test_a_pair_saves_what_it_overlaps():
    without = simulate(shape("dualpipe", 4, 1, 16), even(1))
    paired = simulate(shape("dualpipe", 4, 1, 16), even(1, pair_saving_s=0.5))
    assert paired.step_s == pytest.approx(without.step_s - 0.5 * (16 - 2 - 2))
    pairs = paired.graph.pair_forward, paired.graph.pair_backward
    assert (paired.start_s[pairs[0]] == paired.start_s[pairs[1]]).all()
    assert (paired.end_s[pairs[1]] - paired.start_s[pairs[1]]).tolist() == pytest.approx([2.5] * len(pairs[0]))


def test_one_timeline_is_of_one_plan():
    with pytest.raises(ValueError, match="2 plans"):
        simulate(shape("1f1b", 2, 1, 2), even(1, transfer_s=np.zeros((2, 2))))


def test_uneven_stages_keep_uneven_bytes():
    """1F1B on 2 ranks: two micro-batches on rank 0, one on rank 1."""
    assert peak_in_flight(shape("1f1b", 2, 1, 4), kept_per_stage=[100, 30]).tolist() == [200, 30]


def test_what_waits_for_the_weight_gradient_can_be_smaller():
    """ZB-H1's last rank: one micro-batch between F and B, two more between B and W."""
    late = peak_in_flight(shape("zero_bubble", 3, 1, 9), held_for_weights_ratio=0.25)
    assert late.tolist() == [3, 2.25, 1.5]
    assert peak_in_flight(shape("zero_bubble", 3, 1, 9)).tolist() == [3, 3, 3]


def test_an_illegal_shape_is_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="2 chunks"):
        simulate(shape("zbv", 4, 1, 8), even(1))


def test_a_schedule_that_deadlocks_is_found(monkeypatch):
    """Both ranks want their backward first."""

    def backward_first(_: PipelineShape) -> list[RankOrder]:
        return [
            RankOrder(
                kind=np.array([OpKind.BACKWARD, OpKind.FORWARD], dtype=np.int8),
                micro_batch=np.zeros(2, dtype=np.int32),
                stage=np.full(2, rank, dtype=np.int32),
                is_paired=np.zeros(2, dtype=bool),
            )
            for rank in range(2)
        ]

    monkeypatch.setattr(graph, "rank_orders", backward_first)
    graph.event_graph.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="2 ranks wait forever"):
            simulate(shape("1f1b", 2, 1, 1), even(1))
    finally:
        graph.event_graph.cache_clear()  # other tests ask for this shape
