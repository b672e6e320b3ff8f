"""A run is estimated with the switches of software that its export sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import check_export, find_engine
from meshwright.errors import MeshwrightError
from meshwright.planner.engines import engine_facts
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.planner.search import search
from meshwright.planner.switches import software_lines
from meshwright.runfile import loads, pinned_text
from meshwright.specs.plan import Plan

ENGINES = ("megatron", "torchtitan", "maxtext")


def run_of(engine, *overrides, model="llama3.1-8b", cluster="h100-8x4", micro=1):
    text = (
        f"model: {model}\ndata: {{sequence_length: 4096}}\nbatch: {{global_sequences: 512, micro: {micro}}}\n"
        f"cluster: {cluster}\nengine: {engine}\ntrain: {{steps: 10}}\n"
    )
    return loads(text, overrides=overrides)


def planned(run):
    best = search(request_for(run), top=1).best
    return loads(pinned_text(run, best.plan))


def estimated(run):
    step = estimate_plan(request_for(run), run.plan).step
    return step.step.value, step.memory.reserved_bytes


def lines_of(run):
    request = request_for(run)
    return software_lines(request, search(request, top=1).best.plan)


def exported(run):
    engine = find_engine(run.engine)
    lower = getattr(engine, "lower_export", engine.lower)
    return lower(run, folder=Path("out")).files


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preset", ["engine", "recipe"])
def test_a_plan_of_the_engine_fits_with_what_its_export_sets(engine, preset):
    run = planned(run_of(engine, f"stack.preset={preset}"))
    assert check_export(run) == ()
    estimated_with = estimated(run)
    set_by_the_engine = dict(engine_facts(engine).switches) | dict(engine_facts(engine).exported_switches)
    stated = {k: v for k, v in switches_of(run).stated().items() if v in set_by_the_engine.get(k, ())}
    text = [f"stack.{key}={json.dumps(value)}" for key, value in stated.items()]
    again = loads(pinned_text(run, run.plan), overrides=text)
    assert estimated(again) == estimated_with
    assert estimated(again)[1] <= request_for(run).usable_bytes


def test_megatron_reduces_gradients_in_fp32_and_is_estimated_so():
    run = run_of("megatron", "parallel.data_shard=32", "parallel.sharding=optimizer", micro=2)
    settings = YAML().load(exported(run)["megatron_bridge.yaml"])["ddp"]
    assert settings["grad_reduce_in_fp32"] is True
    run = loads(pinned_text(run, run.plan))
    narrow = loads(pinned_text(run, run.plan), overrides=["stack.gradient_format=bf16"])
    num_parameters = 8_030_261_248  # two bytes less of the gradient of each
    assert estimated(run)[1] - estimated(narrow)[1] == pytest.approx(2 * num_parameters, rel=0.01)
    assert YAML().load(exported(narrow)["megatron_bridge.yaml"])["ddp"]["grad_reduce_in_fp32"] is False


def test_a_recipe_is_exported():
    run = planned(run_of("megatron", "stack.preset=recipe", model="qwen3-30b-a3b", cluster="b200-8x4"))
    model = YAML().load(exported(run)["megatron_bridge.yaml"])["model"]
    assert model["moe_flex_dispatcher_backend"] == "hybridep"
    assert model["cuda_graph_impl"] == "transformer_engine"
    assert "--grad-reduce-in-bf16" in exported(run)["megatron_lm.args"].splitlines()


def test_the_recipe_has_no_line_of_software_and_the_engine_has_one():
    (line,) = lines_of(run_of("megatron"))
    assert "stack.gradient_format=fp32" in line
    assert "stack.preset=recipe" in line
    assert "dispatcher" not in line  # a dense model
    assert lines_of(run_of("megatron", "stack.preset=recipe")) == []


@pytest.mark.parametrize(("engine", "model"), [("torchtitan", "llama3.1-8b"), ("maxtext", "gpt-oss-20b")])
def test_what_a_recipe_does_not_change_is_not_offered(engine, model):
    assert lines_of(run_of(engine, "stack.preset=recipe", model=model)) == []
    assert "attention" not in "".join(lines_of(run_of(engine, model=model)))


@pytest.mark.parametrize(
    ("model", "plan", "named"),
    [
        ("llama3.1-8b", Plan(data_shard=32), set()),
        ("llama3.1-8b", Plan(data_shard=16, tensor=2), {"overlaps_tensor"}),
        ("qwen3-30b-a3b", Plan(data_shard=32, expert=8), {"dispatcher"}),
    ],
)
def test_a_switch_of_the_recipe_that_changes_nothing_of_the_plan_is_not_named(model, plan, named):
    (line,) = software_lines(request_for(run_of("megatron", model=model, cluster="b200-8x4")), plan)
    assert set(re.findall(r"stack\.(\w+)=", line)) == {"gradient_format", "cuda_graphs", "preset"} | named


@pytest.mark.parametrize("compiles", [True, False])
def test_torchtitan_is_compiled_where_the_run_asks_for_it(compiles):
    pins = ("parallel.data_shard=32", "parallel.sharding=gradients")
    run = run_of("torchtitan", f"train.compile={json.dumps(compiles)}", *pins)
    assert switches_of(run).compiles is compiles
    assert f"enable={compiles}" in exported(run)["meshwright_run.py"]
    other = run_of("torchtitan", f"stack.compiles={json.dumps(compiles)}", *pins)
    assert exported(other)["meshwright_run.py"] == exported(run)["meshwright_run.py"]
    assert estimated(other) == estimated(run)


def test_two_keys_that_contradict_each_other_are_refused():
    with pytest.raises(MeshwrightError, match=r"stack\.compiles"):
        run_of("torchtitan", "train.compile=true", "stack.compiles=false")


def test_a_framework_or_a_date_asks_for_its_recipe():
    for key, value in (("framework", "megatron-bridge"), ("vintage", "2026.7")):
        run = run_of("megatron", f"stack.{key}={value}")
        assert switches_of(run).gradient_format == "bf16"
        own = run_of("megatron", f"stack.{key}={value}", "stack.preset=engine")
        assert switches_of(own).gradient_format == "fp32"


def test_gradients_of_weights_in_fp32_are_reduced_so_whatever_the_recipe():
    run = run_of("megatron", "precision=fp32", "stack.preset=recipe")
    assert switches_of(run).gradient_format is None
    own = run_of("megatron", "precision=fp32")
    plan = search(request_for(own), top=1).best.plan
    by_both = [costs[1] for costs in (estimated(loads(pinned_text(one, plan))) for one in (run, own))]
    assert by_both[0] == by_both[1]
    problems = check_export(run_of("megatron", "precision=fp32", "stack.gradient_format=bf16"))
    assert "stack.gradient_format" in [problem.key for problem in problems]
