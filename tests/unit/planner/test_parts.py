"""Plans on clusters of two generations."""

from dataclasses import replace

import pytest
from tests.plan_requests import plan_request

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.pipeline.schedules import shape_of
from meshwright.cost.tables import plan_row
from meshwright.errors import InputError
from meshwright.planner.choice import best_plans
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.generations import budget_of_rank, layers_by_speed, mixed_step, part_of_rank, steps_on
from meshwright.planner.neighbours import neighbours
from meshwright.planner.objective import goal_for
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.scaling.sizes import resized
from meshwright.planner.scored import scored_plans
from meshwright.planner.screen import cost_model
from meshwright.planner.search import search
from meshwright.specs.plan import Plan, Schedule
from meshwright.specs.run import Objective
from meshwright.units import gib


def request(cluster: str, model: str = "llama3.1-70b") -> PlanRequest:
    return request_for(runfile.from_options(model=model, cluster=cluster, global_batch=512, sequence_length=8192))


PLAN = Plan(tensor=4, pipeline=4, data_shard=8)


def by_rank(plan: Plan) -> list[int]:
    """Layers of each pipeline rank in all its stages."""
    shape, layers = shape_of(plan), plan.layers_per_stage or ()
    return [sum(layers[stage] for stage in shape.stages_of(rank)) for rank in range(plan.pipeline)]


def by_speed_of(asked: PlanRequest, plan: Plan) -> tuple[int, ...]:
    """Layers of each stage by the speed of each part."""
    return layers_by_speed(asked, plan, [steps_on(asked, part, plan_row(plan)) for part in asked.cluster.parts])


def seconds(asked: PlanRequest, plan: Plan) -> float:
    return estimate_plan(asked, plan).step.step.value


def test_the_slowest_part_sets_the_pace_of_data_ranks():
    both, slow, fast = (request(name) for name in ("h100-8x8+h200-8x8", "h100-8x16", "h200-8x16"))
    plan = replace(PLAN, pipeline=1, data_shard=32)
    assert seconds(both, plan) == pytest.approx(seconds(slow, plan))
    assert seconds(both, plan) > seconds(fast, plan)
    assert estimate_plan(both, plan).shares == ()


@pytest.mark.parametrize("name", ["h100-8x8+b200-8x8", "b200-8x8+h100-8x8"])
def test_layers_in_proportion_to_speed_are_between_both_parts(name):
    both = request(name)
    layers = by_speed_of(both, PLAN)
    fast = [n for n, part in zip(layers, part_of_rank(both.cluster, PLAN), strict=True) if name.startswith("b") != part]
    assert sum(layers) == 80
    assert min(fast) > 20 > max(layers) - min(fast) + 1
    slow, quick = seconds(request("h100-8x16"), PLAN), seconds(request("b200-8x16"), PLAN)
    equal, by_speed = seconds(both, PLAN), seconds(both, replace(PLAN, layers_per_stage=layers))
    assert quick < by_speed < 0.95 * equal < slow
    # Work in proportion: layers a second add up, and the pipeline's ends and bubble cost some percent.
    assert by_speed == pytest.approx(2 / (1 / slow + 1 / quick), rel=0.05)


def test_parts_of_one_kind_are_one_cluster():
    """A split over two equal parts costs what it does on one cluster of both."""
    joint, whole = request("h100-8x8+h100-8x8"), request("h100-8x16")
    for plan in (
        PLAN,
        replace(PLAN, pipeline=8, data_shard=4, layers_per_stage=(11, *[10] * 6, 9)),
        replace(PLAN, virtual_pipeline=5, schedule=Schedule.INTERLEAVED),
        replace(PLAN, virtual_pipeline=2, schedule=Schedule.ZBV, layers_per_stage=(9, *[10] * 6, 11)),
    ):
        assert seconds(joint, plan) == pytest.approx(seconds(whole, plan), rel=1e-9)
        ours, theirs = (estimate_plan(r, plan).step for r in (joint, whole))
        assert ours.memory.reserved_bytes == pytest.approx(theirs.memory.reserved_bytes)
        assert sum(ours.components_s.values()) == pytest.approx(ours.step.value)


@pytest.mark.parametrize(
    ("virtual", "schedule"), [(2, Schedule.INTERLEAVED), (5, Schedule.INTERLEAVED), (2, Schedule.ZBV)]
)
def test_virtual_stages_get_layers_by_the_speed_of_their_rank(virtual, schedule):
    both = request("h100-8x8+b200-8x8")
    plan = replace(PLAN, virtual_pipeline=virtual, schedule=schedule)
    by_speed = replace(plan, layers_per_stage=by_speed_of(both, plan))
    slow, _, _, fast = by_rank(by_speed)
    assert sum(by_rank(by_speed)) == 80
    assert fast > 20 > slow
    assert seconds(both, by_speed) < 0.95 * seconds(both, plan)
    plain = replace(PLAN, layers_per_stage=by_speed_of(both, PLAN))
    assert seconds(both, by_speed) < seconds(both, plain)  # virtual stages have less of a bubble
    shares = estimate_plan(both, by_speed).shares
    assert [n for share in shares for n in share.layers] == by_rank(by_speed)
    assert shares[0].rank_s == pytest.approx(shares[1].rank_s, rel=0.1)


@pytest.mark.when_touched  # test_the_search_finds_layers_in_proportion_to_speed searches the same kind of cluster
def test_the_list_of_all_plans_has_layers_by_speed():
    both = replace(request("b200-8x1+h100-8x1", "llama3.1-8b"), global_batch=32)
    goal = goal_for(Objective.THROUGHPUT, cluster=both.cluster)
    best, every = best_plans(both, goal=goal, top=1).plans[0], scored_plans(both, goal=goal, most=100)
    assert every.plans[0].plan.layers_per_stage is not None
    assert every.plans[0].step_s <= best.step_s * (1 + 1e-9)
    split = [row for row in every if row.plan.layers_per_stage]
    for row in (every.plans[0], split[-1]):
        alone = estimate_plan(both, row.plan).step
        assert row.step_s == pytest.approx(alone.step.value)
        assert row.step_s * row.spread == pytest.approx(alone.step.high)
        assert row.reserved_bytes == pytest.approx(alone.memory.reserved_bytes)
        assert row.usable_bytes == alone.memory.budget.usable_bytes
    assert len({row.plan for row in every}) == len(every)
    even = scored_plans(both.fixing(layers_per_stage=None), goal=goal, most=50)
    assert all(row.plan.layers_per_stage is None for row in even)


def test_memory_is_that_of_each_part():
    plan = replace(PLAN, layers_per_stage=(15, 15, 25, 25))
    shares = estimate_plan(request("h100-8x8+b200-8x8"), plan).shares
    # One kind of device is costed as if the largest middle stage were the second one, where more is in flight.
    alike = cost_model(request("h100-8x16")).memory(plan_row(plan)).reserved_bytes
    assert max(s.reserved_bytes for s in shares) <= alike
    assert [gib(s.budget.capacity_bytes) for s in shares] == pytest.approx([79.6, 179.1], abs=0.1)
    later = estimate_plan(request("h100-8x8+b200-8x8"), replace(plan, layers_per_stage=(15, 15, 26, 24))).shares
    assert later[0].reserved_bytes == shares[0].reserved_bytes
    assert later[1].reserved_bytes > shares[1].reserved_bytes
    binding = mixed_step(request("h100-8x8+b200-8x8"), replace(PLAN, layers_per_stage=(25, 25, 15, 15)))
    assert binding is not None
    assert binding.fullest.part.name == "h100-8x8"
    budgets = [budget_of_rank(request("h100-8x8+b200-8x8"), PLAN, rank).capacity_bytes for rank in range(4)]
    assert [gib(size) for size in budgets] == pytest.approx([79.6, 79.6, 179.1, 179.1], abs=0.1)


@pytest.mark.when_touched  # the parts themselves are checked above
def test_the_search_finds_layers_in_proportion_to_speed():
    both = request("h100-8x8+b200-8x8")
    goal = goal_for(Objective.THROUGHPUT, cluster=both.cluster)
    best = best_plans(both, goal=goal, top=3).plans[0]
    layers = best.plan.layers_per_stage
    assert layers is not None
    assert by_rank(best.plan)[-1] > by_rank(best.plan)[0]
    equal = search(both.fixing(layers_per_stage=None), top=1).best
    assert equal is not None
    assert best.step_s < 0.95 * equal.step_s
    assert estimate_plan(both, best.plan).step.step.value == pytest.approx(best.step_s)
    mixed = mixed_step(both, best.plan)
    assert mixed is not None
    assert mixed.fits
    even = best_plans(both.fixing(layers_per_stage=None), goal=goal, top=1).plans[0]
    assert even.step_s == pytest.approx(equal.step_s)


def test_engines_with_equal_stages_get_none():
    asked = replace(request("h100-8x8+b200-8x8"), engine="maxtext", stack=stack_for_engine("maxtext"))
    goal = goal_for(Objective.THROUGHPUT, cluster=asked.cluster)
    assert best_plans(asked, goal=goal, top=1).plans[0].plan.layers_per_stage is None


def test_memory_is_that_of_the_smallest_part():
    assert request("h100-8x8+h200-8x8").usable_bytes == request("h100-8x16").usable_bytes
    best = search(request("h100-8x8+h200-8x8"), top=1).best
    assert best is not None
    assert best.reserved_bytes <= request("h100-8x16").usable_bytes


def test_notes_name_the_part_that_binds():
    plan = replace(PLAN, pipeline=1, data_shard=32)
    binding, *alone = notes_on_parts(request("h200-8x8+h100-8x8"), plan)
    assert "h100-8x8 sets the pace" in binding
    assert "79.6 GiB of h100-8x8" in binding
    assert [line.split()[1] for line in alone] == ["h200-8x16", "h100-8x16"]
    assert notes_on_parts(request("h100-8x16"), PLAN) == ()
    split = replace(PLAN, layers_per_stage=(22, 22, 18, 18))
    stages, engines, *_ = notes_on_parts(request("h200-8x8+h100-8x8"), split)
    assert "h200-8x8 has ranks 1 to 2 with 22 layers" in stages
    assert "of 133.4 GiB; h100-8x8 has ranks 3 to 4" in stages
    assert engines.startswith("layers_per_stage is run by megatron, native, torchtitan; the hosts of h200-8x8")


def test_what_is_not_costed_is_refused():
    joint = catalog.joint_cluster("h100-8x1+h200-8x1")
    with pytest.raises(InputError, match="several prices"):
        goal_for(Objective.COST, cluster=joint)
    with pytest.raises(InputError, match="for training runs"):
        runfile.named_cluster(joint.name)


def test_other_sizes_keep_the_shares_of_the_parts():
    for name, num_devices, expected in (
        ("h100-8x1+h200-8x1", 32, "h100-8x2+h200-8x2"),
        ("h100-8x8+h100-4x2", 72, "h100-8x8+h100-4x2"),
        ("h100-8x8+h100-4x2", 36, "h100-8x4+h100-4x1"),
    ):
        assert resized(catalog.joint_cluster(name), num_devices) == catalog.joint_cluster(expected)
    for num_devices in (0, 64, 68):
        with pytest.raises(InputError, match=r"keep their shares of whole nodes.*multiples of 36"):
            resized(catalog.joint_cluster("h100-8x8+h100-4x2"), num_devices)


NODES = "h100-8x8+h100-4x1"
"""Nodes of two sizes and one generation."""


def step_s(cluster: str, plan: Plan, *, global_batch: int) -> float:
    run = runfile.from_options(
        model="llama3.1-8b", cluster=cluster, global_batch=global_batch, sequence_length=8192, engine="any"
    )
    return estimate_plan(request_for(run), plan).step.step.value


def test_groups_inside_the_smaller_nodes_have_the_links_of_a_node():
    """As on nodes of 4 alone, which the ring over nodes of 8 is no faster than, with a smaller node in it."""
    for plan in (Plan(data_shard=68), Plan(tensor=4, data_shard=17), Plan(tensor=2, context=2, data_shard=17)):
        two_sizes, small = (step_s(name, plan, global_batch=68) for name in (NODES, "h100-4x17"))
        assert two_sizes == pytest.approx(small)
    larger = step_s("h100-8x9", Plan(tensor=4, data_shard=18), global_batch=72)
    assert step_s(NODES, Plan(tensor=4, data_shard=17), global_batch=68) > larger


def test_the_best_plan_of_nodes_of_two_sizes_uses_all_devices():
    run = runfile.from_options(model="llama3.1-70b", cluster=NODES, global_batch=136, sequence_length=8192)
    best = best_plans(request_for(run), goal=goal_for(Objective.TIME, cluster=run.cluster)).best
    assert best.plan.num_devices == 68
    assert goal_for(Objective.COST, cluster=run.cluster).usd_per_device_hour  # devices of one kind have one price


def test_pipeline_ranks_of_a_part_have_its_nodes():
    plan = Plan(tensor=4, pipeline=17)
    assert part_of_rank(catalog.joint_cluster(NODES), plan) == (0,) * 16 + (1,)
    run = runfile.from_options(model="llama3.1-70b", cluster=NODES, global_batch=136, sequence_length=8192)
    notes = notes_on_parts(request_for(run), plan)
    assert "nodes have 8 and 4 devices: groups of up to 4 neighbours lie inside every node" in notes[0]
    assert "h100-4x1 has rank 17 with" in notes[1]
    assert not any("the same plan would take" in note for note in notes)


@pytest.mark.when_touched  # test_memory_is_that_of_the_smallest_part plans on parts
def test_no_other_size_is_suggested():
    small = request("h100-8x1+h200-8x1", "llama3.1-405b")
    lacking = explain_infeasible(search(small, top=1))
    assert not any("devices" in text for text in lacking.suggestions)
    enough = request("h100-8x1+h200-8x2", "llama3.1-8b")
    best = search(enough, top=1).best
    assert all(n.num_idle == 0 for n in neighbours(enough, best=best))


def test_scans_over_context_ranks_are_said_to_be_uncalibrated():
    request = plan_request("nemotron-h-8b", "h100-8x1", engine="any")
    assert notes_on_parts(request, Plan(data_shard=8)) == ()
    (note,) = notes_on_parts(request, Plan(context=2, data_shard=4))
    assert "swap sequence for heads" in note
    assert notes_on_parts(plan_request(), Plan(context=2, data_shard=4)) == ()


def test_one_part_by_itself_has_the_network_that_the_run_states():
    def alone(network: str) -> str:
        run = runfile.loads(
            "model: llama3.1-8b\ndata: {sequence_length: 4096}\nbatch: {global_sequences: 256}\n"
            f"cluster: {{name: h100-8x2+h200-8x2, network: {network}}}\n"
        )
        return notes_on_parts(request_for(run), Plan(data_shard=32))[-1]

    assert alone("8x400Gb/s").startswith("on h200-8x4 the same plan would take")
    assert alone("8x400Gb/s") != alone("25Gb/s")
