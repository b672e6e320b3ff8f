"""The switches of software that the planner chooses with a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.answers.explanation import explain_run
from meshwright.answers.plan_ranking import plan_run
from meshwright.answers.run_estimate import estimate_run
from meshwright.answers.scale_study import ScaleQuestion, scale_report
from meshwright.catalog.stacks import features_of
from meshwright.cost.tables import plan_row
from meshwright.engines.base import check_export
from meshwright.engines.choice import planned
from meshwright.engines.native.check import check
from meshwright.errors import InfeasibleError
from meshwright.planner.choice import best_plans, free_request, goal_of, holding_software
from meshwright.planner.engines import engine_facts
from meshwright.planner.host_memory import host_bytes, notes_on_host_memory
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.request import request_for
from meshwright.planner.screen import cost_model
from meshwright.planner.search import search
from meshwright.planner.switches import (
    CHOSEN,
    HELD,
    LEAST_GAIN,
    OFFLOADED_SHARES,
    open_values,
    software_lines,
    with_values,
)
from meshwright.runfile import from_options, load, loads, pinned_text
from meshwright.specs.features import Dispatcher
from meshwright.specs.memory_budget import PLANNING_RATIO
from meshwright.specs.plan import Offload, Recompute
from meshwright.specs.run import Run
from meshwright.units import gib

LARGE = ("megatron", "qwen3-235b-a22b", "h100-8x32", 2048)
SMALL = ("megatron", "qwen3-30b-a3b", "h100-8x4", 512)
DENSE = ("megatron", "llama3.1-70b", "h100-8x64", 1024)


def run_of(engine: str, model: str, cluster: str, batch: int, *keys: str) -> Run:
    return from_options(
        model=model, cluster=cluster, global_batch=batch, sequence_length=4096, engine=engine,
        overrides=["train.steps=100", *keys],
    )  # fmt: skip


def result_of(run: Run):
    return best_plans(free_request(run), goal=goal_of(run))


def held(request, plan):
    return request.fixing(**{name: getattr(plan, name) for name in HELD})


@pytest.mark.parametrize(
    "asked",
    [SMALL, DENSE, ("torchtitan", *SMALL[1:]), ("megatron", "qwen3-30b-a3b", "mi355x-8x4", 512)],
    ids=lambda asked: "-".join(map(str, asked[:3])),
)
def test_what_is_chosen_gains_and_what_is_left_out_does_not(asked):
    run = run_of(*asked)
    request, goal = free_request(run), goal_of(run)
    found = best_plans(request, goal=goal)
    features, best, options = found.request.stack.features, found.plans[0], open_values(request)
    chosen = {name: getattr(features, name) for name in found.request.stack.chosen}
    assert chosen
    assert chosen.items() <= options.items()
    assert best.value * LEAST_GAIN <= search(request, top=1, goal=goal).plans[0].value
    for name, value in options.items():
        other = {key: was for key, was in chosen.items() if key != name}
        if name not in chosen:
            other[name] = value
        changed = search(with_values(held(request, best.plan), other), top=1, goal=goal).plans[0]
        ratio = changed.value / best.value
        assert ratio >= LEAST_GAIN * (1 - 1e-9) if name in chosen else ratio > 1 / LEAST_GAIN, name


LONG = ("native", "llama3.1-8b", "h100-8x1", 8)


def test_activations_go_to_host_memory_where_nothing_fits_otherwise():
    """No more of them than the shares that are tried make necessary, where nobody knows the memory of the hosts."""
    run = run_of(*LONG, "data.sequence_length=1048576")
    run = replace(run, cluster=replace(run.cluster, host_memory_bytes=None))
    found = result_of(run)
    assert found.request.stack.chosen == ("offloaded_activations",)
    share = found.request.stack.features.offloaded_activations
    for less in OFFLOADED_SHARES[: OFFLOADED_SHARES.index(share)]:
        assert search(with_values(free_request(run), {"offloaded_activations": less}), top=1).best is None
    plan = found.plans[0].plan
    stated = replace(run, plan=plan, stack=found.request.stack)
    assert check(stated) == ()
    (note,) = notes_on_host_memory(found.request, plan)
    stays = search(found.request, top=1).plans[0].memory.allocated_bytes
    alone = with_values(found.request, {"offloaded_activations": 0.0})
    assert host_bytes(found.request, plan) == reserved(alone, plan) - stays
    assert f"{gib(host_bytes(found.request, plan)):.1f} GiB of each device in host memory" in note


def test_the_share_of_activations_is_the_fastest_that_the_hosts_hold():
    asked = (*LONG, "data.sequence_length=1048576")
    found, smaller = result_of(run_of(*asked)), result_of(run_of(*asked, "cluster.host_memory=512GiB"))
    for one in (found, smaller):
        request, plan = one.request, one.plans[0].plan
        num_devices, size = request.cluster.devices_per_node, request.cluster.host_memory_bytes
        assert num_devices * host_bytes(request, plan) <= PLANNING_RATIO * size
        (note,) = notes_on_host_memory(request, plan)
        assert f"{gib(num_devices * host_bytes(request, plan)):,.1f} of the {gib(size):,.1f} GiB of a host" in note
    assert smaller.request.cluster.host_memory_bytes == 2**39 < found.request.cluster.host_memory_bytes
    assert host_bytes(found.request, found.plans[0].plan) > host_bytes(smaller.request, smaller.plans[0].plan)
    assert found.plans[0].rank * LEAST_GAIN <= smaller.plans[0].rank


def test_hosts_that_are_too_small_are_refused_with_the_numbers():
    asked = (*LONG, "data.sequence_length=1048576")
    with pytest.raises(
        InfeasibleError, match=r"^host memory: .* a host has 16.0 GiB, of which a plan may fill 15.2"
    ) as e:
        result_of(run_of(*asked, "cluster.host_memory=16GiB"))
    assert "--set cluster.host_memory=SIZE" in e.value.hint


STATES = ("llama3.1-70b", "h100-8x1", 16)


def test_optimizer_states_go_to_host_memory_where_nothing_fits_otherwise():
    run = run_of("native", *STATES)
    found = result_of(run)
    request, plan = found.request, found.plans[0].plan
    assert plan.offload is Offload.OPTIMIZER
    assert request.fixed == {"offload": Offload.OPTIMIZER}
    assert search(free_request(run), top=1).best is None
    (line,) = (line for line in software_lines(request, plan) if "host memory" in line)
    assert line.endswith("(offload=optimizer), as no plan fits with them on the device")
    pinned = loads(pinned_text(run, plan))
    assert check(pinned) == ()
    assert estimate_run(pinned).step.value == found.plans[0].step_s
    assert estimate_run(run).plan == plan
    assert planned(run).plan == plan


@pytest.mark.parametrize("asked", [("native", *STATES, "optimizer={name: lion}"), ("torchtitan", *STATES)])
def test_engines_optimizers_and_devices_without_it_keep_states_on_the_device(asked):
    with pytest.raises(InfeasibleError, match=r"^device memory"):
        result_of(run_of(*asked))


def test_states_stay_on_the_device_where_plans_fit():
    assert result_of(run_of(*LONG)).request.fixed == {}


def test_states_stay_on_the_device_where_that_is_asked():
    run = run_of("native", *STATES)
    with pytest.raises(InfeasibleError, match=r"^device memory: .* largest part: "):
        best_plans(free_request(run).fixing(offload=Offload.NONE), goal=goal_of(run))


def test_offloaded_states_count_against_the_host():
    asked = ("native", "llama3.1-70b", "h100-8x1", 16)
    found = best_plans(free_request(run_of(*asked)).fixing(offload=Offload.OPTIMIZER), goal=goal_of(run_of(*asked)))
    pinned = pinned_text(run_of(*asked), found.plans[0].plan)
    assert estimate_run(loads(pinned)).plan.offload is Offload.OPTIMIZER
    with pytest.raises(InfeasibleError, match=r"^host memory: .* of a node's 8; a host has 256.0 GiB"):
        estimate_run(loads(pinned, overrides=["cluster.host_memory=256GiB"]))
    request = free_request(run_of(*asked, "cluster.host_memory=256GiB")).fixing(offload=Offload.OPTIMIZER)
    result = search(request, top=1)
    assert result.best is None
    assert result.lacks_host_memory
    assert result.shortfall.what == "host memory of a device"
    assert result.shortfall.needed > result.shortfall.available


def reserved(request, plan):
    return float(cost_model(request).memory(plan_row(plan)).allocated_bytes)


@pytest.mark.parametrize("asked", [LONG, ("torchtitan", *LONG[1:])])
def test_where_plans_fit_or_the_engine_does_not_run_it_no_activations_go(asked):
    assert "offloaded_activations" not in result_of(run_of(*asked)).request.stack.chosen


def test_an_engine_that_keeps_its_switches_is_told_the_share():
    run = run_of(*LONG, "data.sequence_length=1048576", "stack.preset=engine")
    with pytest.raises(InfeasibleError) as error:
        result_of(run)
    assert "fits with stack.offloaded_activations=" in error.value.hint


@pytest.mark.parametrize(
    ("keys", "graphs", "overlaps", "said"),
    [
        ((), "partial", True, "stack.cuda_graphs=partial: the recipe of megatron-bridge has full"),
        (("stack.cuda_graphs=full",), "full", False, "stack.overlaps_experts=false: the recipe of megatron-bridge has"),
    ],
)
def test_a_recipe_whose_switches_exclude_each_other_keeps_layouts_with_experts(keys, graphs, overlaps, said):
    asked = ("megatron", "deepseek-v3", "gb200-4x64", 4096, "precision=mxfp8", "stack.preset=recipe")
    found = result_of(run_of(*asked, *keys))
    assert found.plans[0].plan.expert >= 8
    software = features_of(found.request.stack, found.request.cluster.accelerator, precision="mxfp8")
    assert (software.cuda_graphs, software.overlaps_experts) == (graphs, overlaps)
    assert any(note.startswith(said) for note in notes_on_parts(found.request, found.plans[0].plan))


@pytest.mark.when_touched  # test_what_is_chosen_gains_and_what_is_left_out_does_not searches such plans
def test_a_dispatcher_for_nodes_brings_experts_over_nodes():
    own = run_of(*LARGE, "stack.preset=engine")
    assert result_of(own).plans[0].plan.expert == 8
    found = result_of(run_of(*LARGE))
    assert found.request.stack.features.dispatcher is Dispatcher.HYBRIDEP
    assert found.plans[0].plan.expert > 8


@pytest.mark.parametrize(
    "key", ["stack.preset=engine", "stack.preset=recipe", "stack.framework=megatron-bridge", "stack.vintage=2026.1"]
)
def test_a_run_that_states_its_software_has_none_chosen(key):
    run = run_of(*SMALL, key)
    assert open_values(free_request(run)) == {}
    assert result_of(run).request.stack == run.stack


@pytest.mark.when_touched  # test_a_run_that_states_its_software_has_none_chosen states all
@pytest.mark.parametrize(
    ("key", "value"),
    [("dispatcher", "all-to-all"), ("cuda_graphs", "none"), ("overlaps_experts", "false"), ("dispatcher", "deepep")],
)
def test_a_stated_switch_is_never_overruled_and_leaves_the_others_open(key, value):
    run = run_of(*SMALL, f"stack.{key}={value}")
    stack = result_of(run).request.stack
    assert getattr(stack.features, key) == getattr(run.stack.features, key)
    assert key not in stack.chosen
    assert stack.chosen


@pytest.mark.parametrize("engine", ["native", "maxtext"])
def test_an_engine_that_sets_none_of_them_has_none_chosen(engine):
    run = run_of(engine, *SMALL[1:])
    assert open_values(free_request(run)) == {}


def test_any_engine_has_its_dispatcher_chosen_and_else_the_software_of_its_release():
    run = run_of("any", *SMALL[1:])
    assert open_values(free_request(run)) == {"dispatcher": "hybridep"}
    assert not run.stack.features.dispatcher
    for stated in ("stack.framework=megatron-bridge", "stack.vintage=2025.5", "stack.dispatcher=all-to-all"):
        assert open_values(free_request(run_of("any", *SMALL[1:], stated))) == {}


def test_a_cluster_of_parts_has_none_chosen():
    run = run_of("megatron", "qwen3-30b-a3b", "h100-8x2+h200-8x2", 512)
    assert run.cluster.parts
    assert open_values(free_request(run)) == {}


def test_what_is_open_is_what_the_engine_sets_on_the_device_and_trains_the_same_numbers():
    for device, dispatcher in (("h100", "hybridep"), ("mi300x", "deepep")):
        options = open_values(free_request(run_of("megatron", "qwen3-30b-a3b", f"{device}-8x4", 512)))
        assert options["dispatcher"] == dispatcher
        facts = engine_facts("megatron")
        settable = (*facts.switches, *facts.exported_switches)
        assert options.keys() <= set(CHOSEN)
        assert all(
            any(name == key and value in allowed for key, allowed in settable) for name, value in options.items()
        )
    capacity = run_of("megatron", "qwen3-30b-a3b", "mi300x-8x4", 512, "stack.capacity_factor=1.0")
    assert "dispatcher" not in open_values(free_request(capacity))  # DeepEP pads to none, HybridEP is NVIDIA's
    offloaded = run_of(*DENSE, "stack.offloaded_activations=0.5")
    assert "cuda_graphs" not in open_values(free_request(offloaded))


def test_a_plan_with_offloaded_activations_is_one_that_the_engine_exports():
    run = run_of("megatron", "llama3.1-70b", "h100-8x8", 512, "stack.offloaded_activations=0.5")
    plans = best_plans(free_request(run), goal=goal_of(run), top=20).plans
    assert plans
    assert {(each.plan.pipeline, each.plan.recompute) for each in plans} == {(1, Recompute.NONE)}
    for each in plans:
        assert check_export(loads(pinned_text(run, each.plan))) == ()


@pytest.mark.when_touched  # test_what_is_chosen_gains_and_what_is_left_out_does_not costs both
def test_hybridep_is_never_slower_than_deepep_in_the_cost_model():
    for asked in (LARGE, SMALL, ("megatron", "deepseek-v3", "b200-8x32", 2048)):
        request = free_request(run_of(*asked))
        best = result_of(run_of(*asked)).plans[0].plan
        times = [
            search(with_values(held(request, best), {"dispatcher": kind}), top=1).plans[0].step_s
            for kind in (Dispatcher.HYBRIDEP, Dispatcher.DEEPEP)
        ]
        assert times[0] <= times[1]


def test_all_answers_about_a_free_plan_agree_and_the_written_file_has_their_numbers(tmp_path):
    run = run_of(*SMALL)
    ranking = plan_run(run, top=3)
    best, stack = ranking.best, ranking.run.stack
    chosen = set(ranking.request.stack.chosen)
    assert {"dispatcher", "overlaps_experts"} <= chosen
    step_s, plan = best.step.step.value, best.plan
    done = estimate_run(run)
    assert (done.plan, done.step.value, done.run.stack) == (plan, step_s, stack)
    assert explain_run(run).difference.this.step.step.value == step_s
    point = scale_report(run, ScaleQuestion(devices=(32,))).curve.points[0]
    assert (point.costed.plan, point.costed.step_s) == (plan, step_s)
    for rank, each in enumerate(ranking, start=1):
        again = estimate_run(ranking.pinned(rank=rank))
        assert again.step == each.step.step
        assert again.memory == each.step.memory
    ranking.write(tmp_path / "run.yaml")
    written = load(tmp_path / "run.yaml")
    assert chosen <= written.stack.features.stated().keys()
    assert estimate_run(written).step.value == step_s
    stated = ranking.to_dict()["request"]["stack"]
    assert all(stated[name] == value for name, value in written.stack.features.stated().items())


@pytest.mark.when_touched  # test_all_answers_about_a_free_plan_agree_and_the_written_file_has_their_numbers writes them
def test_an_export_has_the_chosen_switches_and_a_run_that_is_trained_those_of_the_engine():
    run = run_of(*SMALL)
    exported, ranking = planned(run, is_export=True), plan_run(run, top=1)
    assert (exported.plan, exported.stack) == (ranking.best.plan, ranking.run.stack)
    trained = planned(run)
    assert trained.stack == run.stack
    own = best_plans(holding_software(free_request(run)), goal=goal_of(run)).plans[0].plan
    assert trained.plan == own
    assert own != exported.plan


def test_a_pinned_plan_is_explained_under_the_software_of_its_run():
    run = run_of(*SMALL, "stack.preset=engine")
    pinned = plan_run(run, top=1).pinned()
    opened = loads(pinned.text.replace("  preset: engine\n", "  gradient_format: fp32\n"))
    assert opened.stack.is_open
    assert explain_run(opened).difference.step_ms.delta == 0.0


def test_the_second_line_names_what_was_chosen_and_how_to_keep_what_the_engine_sets():
    found = result_of(run_of(*SMALL))
    best = found.plans[0].plan
    chosen, of_engine = software_lines(found.request, best)
    assert chosen.startswith("software: stack.dispatcher=hybridep, ")
    assert chosen.endswith("chosen with the plan; --set stack.preset=engine keeps the engine's own")
    assert "stack.gradient_format=fp32, as the engine sets it" in of_engine
    assert not any("chosen" in line for line in software_lines(request_for(run_of(*SMALL)), best))


def test_a_limit_leaves_out_slower_plans_alone():
    request = free_request(run_of(*SMALL, "stack.preset=engine"))
    best = search(request, top=1).best
    assert search(request, top=1, limit=best.closed_form_s * 1.001).best.plan == best.plan
    assert search(request, top=1, limit=best.closed_form_s * 0.5).best is None
