import re

import pytest
from tests.plan_requests import plan_request

from meshwright.answers.documents.plan import why_not_sentence
from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError, UnknownNameError
from meshwright.planner import PlanRequest, compare, explain_infeasible, nearest_losers, search, why_not
from meshwright.planner.explain import WhyNotVerdict
from meshwright.specs.plan import Recompute, Schedule, Sharding


def request(model="llama3-8b", cluster="h100-8x2", engine="megatron", batch=64, **fixed) -> PlanRequest:
    return plan_request(model, cluster, engine=engine, global_batch=batch, fixed=fixed)


@pytest.fixture(scope="module")
def result():
    return search(request(), top=6)


@pytest.fixture(scope="module")
def experts():
    return search(request("qwen3-30b-a3b", "h100-8x4", "native", 128), top=1)


def test_component_differences_add_up_to_the_step(result):
    for comparison in nearest_losers(result, count=5):
        total = sum(d.delta for d in comparison.components_ms)
        assert total == pytest.approx(comparison.step_ms.delta, abs=1e-6)
        assert comparison.step_ms.delta >= 0
        sizes = [abs(d.delta) for d in comparison.components_ms]
        assert sizes == sorted(sizes, reverse=True)


def test_memory_differences_add_up_to_the_headroom(result):
    for comparison in nearest_losers(result):
        used = sum(d.delta for d in comparison.memory_gib)
        assert used == pytest.approx(-comparison.headroom_gib.delta, abs=1e-6)


def test_a_plan_against_itself_differs_in_nothing(result):
    same = compare(result.best, result.best, usable_bytes=1e9)
    assert all(d.delta == 0 for d in (*same.components_ms, *same.memory_gib))


def test_why_not_wider_tensor_parallelism(result):
    answer = why_not(request(), {"tensor": 8}, winner=result.best)
    assert answer.verdict is WhyNotVerdict.SLOWER
    assert answer.comparison is not None
    assert answer.comparison.decided_by.name == "tensor_parallel"
    assert "tensor=8: slower" in why_not_sentence(answer)


def test_why_not_an_illegal_degree(result):
    answer = why_not(request(), {"tensor": 3}, winner=result.best)
    assert answer.verdict is WhyNotVerdict.ILLEGAL
    assert "tensor 3 does not divide 32 attention heads" in why_not_sentence(answer)


def test_why_not_a_schedule_the_engine_lacks(result):
    answer = why_not(request(), {"schedule": Schedule.DUALPIPE, "pipeline": 2}, winner=result.best)
    assert answer.verdict is WhyNotVerdict.ILLEGAL
    assert "has no dualpipe schedule" in why_not_sentence(answer)


@pytest.mark.parametrize(
    ("schedule", "hint"),
    [(Schedule.DUALPIPE, "--engine any plans dualpipe"), (Schedule.ZBV, "--engine native runs zbv")],
)
def test_a_schedule_that_another_engine_has_names_it(schedule, hint):
    lacking = request(schedule=schedule)
    assert any(hint in text for text in explain_infeasible(search(lacking, top=1)).suggestions)


def test_why_not_what_does_not_fit():
    wanted = request("llama3-70b", "h100-8x4")
    best = search(wanted, top=1).best
    answer = why_not(wanted, {"tensor": 1, "pipeline": 1, "sharding": 0}, winner=best)
    assert answer.verdict is WhyNotVerdict.DOES_NOT_FIT
    assert answer.infeasible is not None
    assert answer.infeasible.needed_gib > answer.infeasible.available_gib
    assert "GiB" in why_not_sentence(answer)


def test_why_not_the_winner_itself(result):
    plan = result.best.plan
    answer = why_not(request(), {"tensor": plan.tensor, "pipeline": plan.pipeline}, winner=result.best)
    assert answer.verdict is WhyNotVerdict.BEST


@pytest.mark.parametrize(
    "asked", [{"recompute": Recompute.FULL}, {"recompute": Recompute.NONE}, {"recompute_layers": 2}]
)
def test_why_not_another_recomputation_than_the_best_plan_s_modules(experts, asked):
    answer = why_not(experts.request, asked, winner=experts.best)
    assert experts.best.plan.recompute_modules
    assert answer.verdict in (WhyNotVerdict.SLOWER, WhyNotVerdict.DOES_NOT_FIT)


@pytest.mark.when_touched  # test_nothing_fits (unit/cli/test_plan.py) names the devices that fit
def test_infeasible_names_the_nearest_number_of_devices_that_fits():
    lacking = explain_infeasible(search(request("llama3-70b", "h100-8x1", "native"), top=1))
    assert lacking.needed_gib is not None
    assert lacking.needed_gib > lacking.available_gib
    assert sum(lacking.memory_gib.values()) == pytest.approx(lacking.needed_gib, rel=1e-9)
    (devices,) = [s for s in lacking.suggestions if "devices" in s]
    name, plan = re.fullmatch(r"fits with --cluster (h100-8x\d+), \d+ devices: (.+)", devices).groups()
    named = catalog.cluster(name)
    assert f", {named.num_devices} devices: " in devices
    assert search(request("llama3-70b", name, "native"), top=1).best.plan.describe() == plan
    assert search(request("llama3-70b", f"h100-8x{named.num_nodes // 2}", "native"), top=1).best is None


def test_a_choice_that_nobody_made_is_no_reason():
    """TorchTitan does not shard optimizer states alone, which is the usual sharding elsewhere."""
    lacking = explain_infeasible(search(request("llama3-8b", "h100-3x1", "torchtitan", 64, context=4), top=1))
    assert "the cluster has 3" in lacking.binding
    assert "shard" not in lacking.binding.replace("data_shard", "")


def test_infeasible_by_a_fixed_field_says_which():
    wanted = request("llama3-70b", "h100-8x4", "native", pipeline=1, tensor=1, sharding=0)
    lacking = explain_infeasible(search(wanted, top=1))
    assert any(s.startswith("fits when sharding is not held at") for s in lacking.suggestions)


def test_an_impossible_degree_is_explained():
    lacking = explain_infeasible(search(request(tensor=5), top=1), suggest=False)
    assert lacking.nearest is None
    assert "tensor 5 does not divide" in lacking.binding


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({"data_shard": 3}, "data 3 x context 1 x tensor 1 x pipeline 1 = 3 devices, the cluster has 8"),
        ({"data_shard": 4, "tensor": 2, "schedule": Schedule.ZBV}, "data_shard=4, tensor=2, schedule=zbv at once"),
    ],
)
def test_a_fixed_data_width_that_no_plan_has_is_explained(fixed, reason):
    lacking = explain_infeasible(search(request("llama3-8b", "h100-8x1", "any", **fixed), top=1), suggest=False)
    assert lacking.binding.startswith("no legal plan: ")
    assert reason in lacking.binding


def test_unknown_field():
    with pytest.raises(UnknownNameError, match="tensr"):
        request(tensr=2)


def test_share_of_memory_out_of_range():
    with pytest.raises(InputError, match="share of usable memory"):
        plan_request(usable_memory_ratio=1.5)


def test_memory_is_named_where_it_forbids_the_choices_of_the_best_plan():
    """Without tensor or context parallelism one sequence of 8,192 tokens leaves no memory without recomputation."""
    asked = request("llama3-70b", "h100-8x8", batch=128)
    best = search(asked, top=1).best
    assert best is not None
    answer = why_not(asked, {"tensor": 1, "context": 1}, winner=best)
    assert answer.verdict is WhyNotVerdict.SLOWER
    assert "memory binds" in answer.binding
    assert answer.binding in why_not_sentence(answer)
    assert "GiB" in why_not(asked, {"pipeline": 1}, winner=best).binding


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({"micro_batch": 2}, "memory binds: with the rest of the best plan it needs"),
        ({"sharding": Sharding.NONE}, "memory binds"),
        ({"micro_batch": 16}, "the rule of global batch binds: with the rest of the best plan a global batch of 64"),
        ({"tensor": 8}, ""),  # runs, and takes longer
        ({"context": 2}, ""),
    ],
)
def test_what_binds_is_what_forbids_the_best_plan_with_that_changed(result, fixed, reason):
    answer = why_not(request(), fixed, winner=result.best)
    assert answer.verdict is WhyNotVerdict.SLOWER
    assert answer.binding.startswith(reason)
    assert bool(answer.binding) == bool(reason)


def test_a_split_of_layers_brings_its_pipeline(result):
    answer = why_not(request(), {"layers_per_stage": (17, 15)}, winner=result.best)
    assert answer.comparison is not None
    assert answer.comparison.loser.plan.layers_per_stage == (17, 15)
    assert "has 2 stages" not in answer.binding


@pytest.mark.parametrize(
    "fixed",
    [
        {"recompute": Recompute.FULL, "recompute_modules": ("norm",)},
        {"recompute": Recompute.NONE, "recompute_layers": 2},
        {"recompute_modules": ("norm",), "recompute_layers": 2},
    ],
)
def test_kinds_of_recomputation_that_contradict_each_other(fixed):
    with pytest.raises(InputError, match="recompute_"):
        request(**fixed)
    request(recompute=Recompute.NONE, recompute_modules=(), recompute_layers=None)
