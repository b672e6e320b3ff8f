"""Laws of pipelines for random shapes and stage times."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.cost.pipeline.closed_form import in_flight, waiting_s
from meshwright.cost.pipeline.graph import event_graph
from meshwright.cost.pipeline.orders import OpKind
from meshwright.cost.pipeline.schedules import PipelineShape, schedule_shortfall
from meshwright.cost.pipeline.simulate import MOST_TOGETHER, Sends, StageTimes, lengths_s, peak_in_flight, simulate
from meshwright.specs.plan import SCHEDULES, Schedule

TINY = 1e-9
any_schedule = st.sampled_from(Schedule)
any_sends = st.sampled_from(Sends)


@st.composite
def shapes(draw, schedules=any_schedule) -> PipelineShape:
    schedule = draw(schedules)
    chunks = {Schedule.INTERLEAVED: st.integers(2, 4), Schedule.ZBV: st.just(2), Schedule.DUALPIPE_V: st.just(2)}
    shape = PipelineShape(
        schedule=schedule,
        num_ranks=draw(st.integers(1, 7)),
        num_chunks=draw(chunks.get(schedule, st.just(1))),
        num_micro_batches=draw(st.integers(1, 18)),
    )
    if schedule is Schedule.DUALPIPE:
        half_p, half_m = draw(st.integers(1, 4)), draw(st.integers(0, 5))
        shape = replace(shape, num_ranks=2 * half_p, num_micro_batches=4 * half_p + 2 * half_m)
    assume(schedule_shortfall(shape) is None)
    return shape


times_of_one = st.floats(0.05, 20)


@st.composite
def uneven(draw, shape: PipelineShape, sends=any_sends) -> StageTimes:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    f, b, w, x = np.exp(rng.uniform(np.log(0.05), np.log(5), (4, shape.num_stages)))
    least = np.minimum(f.min(), b + w)
    return StageTimes(
        forward_s=f,
        backward_input_s=b,
        backward_weight_s=w,
        transfer_s=x * draw(st.sampled_from([0, 0.1, 1])),
        pair_saving_s=least * draw(st.sampled_from([0, 0.5, 1])),
        sends=draw(sends),
    )


@given(st.data(), st.lists(shapes(), min_size=1, max_size=5), st.sampled_from([1, 300, MOST_TOGETHER]))
def test_plans_are_as_long_together_as_each_of_them(data, several, most):
    cases = [(shape, data.draw(uneven(shape))) for shape in several]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[lengths_s.__module__], "MOST_TOGETHER", most)
        assert lengths_s(cases) == [simulate(*case).step_s for case in cases]


@given(st.data(), shapes())
def test_a_rank_does_one_thing_at_a_time_and_nothing_before_its_input(data, shape):
    times = data.draw(uneven(shape, sends=st.just(Sends.OVERLAPPED)))
    timeline = simulate(shape, times)
    graph, start, end = timeline.graph, timeline.start_s, timeline.end_s
    in_pair = np.isin(np.arange(graph.num_ops), graph.pair_forward)
    for rank in range(shape.num_ranks):
        ops = np.arange(graph.rank_bounds[rank], graph.rank_bounds[rank + 1])
        ops = ops[~in_pair[ops]]
        assert (start[ops[1:]] >= end[ops[:-1]] - TINY).all()

    # Looked up anew from what the operations are, not from the graph's own dependencies.
    done = {
        (int(kind) != OpKind.FORWARD, int(k), int(s)): (float(e), int(r))
        for kind, k, s, e, r in zip(graph.kind, graph.micro_batch, graph.stage, end, graph.rank, strict=True)
        if kind != OpKind.BACKWARD_WEIGHT
    }
    transfer = np.broadcast_to(times.transfer_s, shape.num_stages)
    for op in range(graph.num_ops):
        kind, k, s = int(graph.kind[op]), int(graph.micro_batch[op]), int(graph.stage[op])
        if kind == OpKind.FORWARD:
            needs, hop = (False, k, s - 1), s - 1
        elif kind == OpKind.BACKWARD_WEIGHT:
            needs, hop = (True, k, s), s
        else:
            needs, hop = ((True, k, s + 1) if s + 1 < shape.num_stages else (False, k, s)), s
        if needs[2] >= 0:
            ready_s, rank = done[needs]
            assert start[op] >= ready_s + transfer[hop] * (rank != graph.rank[op]) - TINY


@given(st.data(), shapes())
def test_every_micro_batch_passes_every_stage_once(data, shape):
    graph = event_graph(shape)
    seen = np.zeros((4, shape.num_micro_batches, shape.num_stages), dtype=int)
    np.add.at(seen, (graph.kind, graph.micro_batch, graph.stage), 1)
    assert (seen[OpKind.FORWARD] == 1).all()
    assert (seen[OpKind.BACKWARD_INPUT] + seen[OpKind.BACKWARD] == 1).all()
    assert (seen[OpKind.BACKWARD_WEIGHT] == seen[OpKind.BACKWARD_INPUT]).all()
    assert all(shape.stages_of(rank).count(stage) == 1 for rank, stage in zip(graph.rank, graph.stage, strict=True))


@given(st.data(), shapes())
def test_a_step_lies_between_its_bounds(data, shape):
    times = data.draw(uneven(shape))
    timeline = simulate(shape, times)
    work = shape.num_micro_batches * sum(
        np.broadcast_to(part, shape.num_stages).sum()
        for part in (times.forward_s, times.backward_input_s, times.backward_weight_s)
    )
    hops = 2 * shape.num_micro_batches * (np.broadcast_to(times.transfer_s, shape.num_stages) * shape.hop_crosses)
    assert timeline.step_s >= timeline.busy_s.max() - TINY
    assert timeline.step_s <= work + hops.sum() + TINY
    if times.sends is Sends.OVERLAPPED and not np.any(times.pair_saving_s):
        assert timeline.busy_s.sum() == pytest.approx(work)


@given(st.data(), shapes())
def test_nothing_gets_faster_when_an_operation_gets_slower(data, shape):
    times = data.draw(uneven(shape))
    field = data.draw(st.sampled_from(["forward_s", "backward_input_s", "backward_weight_s", "transfer_s"]))
    slower = np.array(np.broadcast_to(getattr(times, field), shape.num_stages))
    slower[data.draw(st.integers(0, shape.num_stages - 1))] += 1.0
    before = simulate(shape, times).step_s
    assert simulate(shape, replace(times, **{field: slower})).step_s >= before - TINY


def steps(shape: PipelineShape, f: float, b: float, w: float, x: float = 0, s: float = 0) -> tuple[float, float]:
    """(simulation, closed form) of even stages; f, b and w of one rank."""
    v = shape.num_chunks
    times = StageTimes(forward_s=f / v, backward_input_s=b / v, backward_weight_s=w / v, transfer_s=x, pair_saving_s=s)
    waits_s = waiting_s(
        *counts(shape),
        forward_s=f, backward_input_s=b, backward_weight_s=w, transfer_s=x, pair_saving_s=s,
    )  # fmt: skip
    return simulate(shape, times).step_s, float(shape.num_micro_batches * (f + b + w) + waits_s)


def counts(shape: PipelineShape):
    return shape.schedule, shape.num_ranks, shape.num_chunks, shape.num_micro_batches


@given(shapes(), times_of_one, times_of_one, times_of_one, st.floats(0, 1))
def test_the_closed_form_is_the_simulation_without_transfers(shape, f, b, w, saved):
    simulated, formula = steps(shape, f, b, w, s=saved * min(f, b + w))
    assert formula == pytest.approx(simulated, rel=1e-9)


@given(shapes(st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B])), *[times_of_one] * 4)
def test_the_closed_form_of_plain_schedules_is_exact_with_any_transfer(shape, f, b, w, x):
    simulated, formula = steps(shape, f, b, w, x)
    assert formula == pytest.approx(simulated, rel=1e-9)


@given(shapes(), times_of_one, times_of_one, times_of_one, st.floats(0, 1))
def test_the_closed_form_with_transfers_shorter_than_a_pass(shape, f, b, w, x):
    p, m = shape.num_ranks, shape.num_micro_batches
    simulated, formula = steps(shape, f, b, w, x * min(f, b, w) / shape.num_chunks)
    is_exact = {
        Schedule.INTERLEAVED: m % p == 0,
        Schedule.ZERO_BUBBLE: m >= 2 * p,
        Schedule.ZBV: False,
        Schedule.DUALPIPE_V: False,
    }.get(shape.schedule, True)
    if is_exact:
        assert formula == pytest.approx(simulated, rel=1e-9)
    elif shape.schedule is Schedule.ZBV:
        assert 0.9 * simulated <= formula <= simulated * (1 + TINY)
    else:
        assert formula >= simulated * (1 - TINY)


@given(shapes())
def test_activations_in_flight_are_as_the_formula_says(shape):
    formula = in_flight(*counts(shape), np.arange(shape.num_ranks))
    assert peak_in_flight(shape) == pytest.approx(np.broadcast_to(formula, shape.num_ranks))
    assert (peak_in_flight(shape, held_for_weights_ratio=0.3) <= peak_in_flight(shape) + TINY).all()


@given(st.integers(2, 7), st.integers(2, 4), st.integers(1, 24), *[times_of_one] * 3)
def test_interleaving_never_slows_even_stages_down(p, v, m, f, b, w):
    def shape(schedule, chunks):
        return PipelineShape(schedule=schedule, num_ranks=p, num_chunks=chunks, num_micro_batches=m)

    plain, _ = steps(shape(Schedule.ONE_F_ONE_B, 1), f, b, w)
    interleaved, _ = steps(shape(Schedule.INTERLEAVED, v), f, b, w)
    zero_bubble, _ = steps(shape(Schedule.ZERO_BUBBLE, 1), f, b, w)
    assert interleaved <= plain * (1 + TINY)
    assert zero_bubble <= plain * (1 + TINY)


@given(st.lists(shapes(), min_size=1, max_size=6), times_of_one, times_of_one, times_of_one, st.floats(0, 1))
def test_a_table_of_plans_is_evaluated_as_each_plan_alone(some, f, b, w, x):
    index, p, v, m = np.array(
        [(SCHEDULES.index(s.schedule), s.num_ranks, s.num_chunks, s.num_micro_batches) for s in some]
    ).T
    together = waiting_s(index, p, v, m, forward_s=f, backward_input_s=b, backward_weight_s=w, transfer_s=x)
    alone = [waiting_s(*counts(s), forward_s=f, backward_input_s=b, backward_weight_s=w, transfer_s=x) for s in some]
    assert together.tolist() == pytest.approx(alone)
    kept = [float(in_flight(*counts(s), rank=0)) for s in some]
    assert in_flight(index, p, v, m, rank=0).tolist() == pytest.approx(kept)
