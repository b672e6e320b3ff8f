"""`meshwright rehearse`: plans are made small with their structure kept, run, and compared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.cli.rehearse import _require_possible
from meshwright.engines.native import rehearsal
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.rehearsal import RehearsalResult, rehearse, shrink
from meshwright.errors import InfeasibleError
from meshwright.programs import install_command
from meshwright.specs.model import AttentionKind
from meshwright.specs.plan import Plan, Schedule, Sharding
from meshwright.training import cpu_libraries
from meshwright.training.models import build_model

pytestmark = pytest.mark.usefixtures("warm_ranks")

TEXT = """
model: llama3.1-70b
data: {source: synthetic, sequence_length: 8192}
batch: {global_sequences: 512, micro: 1}
precision: bf16
cluster: h100-8x32
parallel: {tensor: 8, pipeline: 4, virtual_pipeline: 5, schedule: interleaved}
train: {tokens: 1e12}
"""
EQUAL = RehearsalResult(
    plan="TP2",
    num_processes=2,
    losses=[2.0],
    reference_losses=[2.0],
    gradient_errors={"a": 1e-7},
    weight_errors={"a": 0.0},
    memory_bytes=[2**20, 2**20],
    seconds=1.0,
)


@pytest.fixture
def run():
    return runfile.loads(TEXT)


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "run.yaml").write_text(TEXT)
    return "run.yaml"


# --- what is run ---

PLANS = {
    "PP4 TP8 DP8": (Plan(pipeline=4, tensor=8, data_shard=8), {"pipeline": 2, "tensor": 2}, ("DP",)),
    "TP8": (Plan(tensor=8), {"tensor": 4}, ()),
    "PP3": (Plan(pipeline=3), {"pipeline": 3}, ()),
    "PP8 in threes": (Plan(pipeline=3, tensor=3), {"pipeline": 2, "tensor": 2}, ()),
    "FSDP64": (Plan(data_shard=64, sharding=Sharding.PARAMETERS), {"data_shard": 4}, ()),
    "HSDP": (Plan(data_shard=8, data_replicate=8), {"data_shard": 2, "data_replicate": 2}, ()),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_axis_is_kept_while_there_is_room(run, name):
    plan, degrees, left_out = PLANS[name]
    toy = shrink(run, plan, num_processes=4)
    assert {axis: getattr(toy.plan, axis) for axis in rehearsal.AXES if getattr(toy.plan, axis) > 1} == degrees
    assert toy.omitted_axes == left_out
    assert toy.plan.num_devices <= 4
    assert toy.plan.sharding is plan.sharding


def test_what_was_scaled_is_said(run):
    assert shrink(run, run.plan, num_processes=4).changes == (
        "PP 4 -> 2", "TP 8 -> 2", "DP 8 -> 1", "VPP 5 -> 2",
    )  # fmt: skip
    assert shrink(run, Plan(tensor=2), num_processes=4).changes == ()


@pytest.mark.parametrize("num_processes", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=8, virtual_pipeline=5, tensor=8, schedule=Schedule.INTERLEAVED),
        Plan(pipeline=4, layers_per_stage=(19, 20, 20, 21), data_shard=4),
        Plan(tensor=8, sequence_parallel=False, data_shard=4, sharding=Sharding.PARAMETERS, micro_batch=4),
    ],
)
def test_the_engine_can_run_every_toy(run, plan, num_processes):
    toy = shrink(run, plan, num_processes=num_processes)
    assert check_plan(toy.plan, run=toy.run) == []
    assert toy.run.global_batch % (toy.plan.micro_batch * toy.plan.data) == 0
    build_model(toy.run.model)


EXPERT_PLANS = {
    "EP32": (Plan(data_shard=64, expert=32), 4, {"expert": 2}, ()),  # two groups, as there are several
    "EP64": (Plan(data_shard=64, expert=64), 4, {"expert": 4}, ()),
    "EP8 in tensor ranks": (
        Plan(tensor=4, pipeline=8, data_shard=4, expert=8), 4, {"expert": 2}, ("DP",),
    ),
    "no room": (Plan(pipeline=8, data_shard=8, expert=8), 2, {}, ("DP", "EP")),
    "cut experts": (Plan(tensor=4, data_shard=8, expert=4, expert_tensor=4), 4,
                    {"expert": 2, "expert_tensor": 2}, ()),
    "as it is": (Plan(data_shard=6, expert=3), 8, {"expert": 3}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_experts_are_shared_out_while_there_is_room(run, name):
    plan, num_processes, degrees, left_out = EXPERT_PLANS[name]
    experts = replace(catalog.model("qwen3-30b-a3b").experts, num_shared=1)
    model = replace(catalog.model("qwen3-30b-a3b"), experts=experts)
    toy = shrink(replace(run, model=model), plan, num_processes=num_processes)
    found = {axis: getattr(toy.plan, axis) for axis in ("expert", "expert_tensor")}
    assert {axis: degree for axis, degree in found.items() if degree > 1} == degrees
    assert toy.omitted_axes == left_out
    assert check_plan(toy.plan, run=toy.run) == []


def test_the_toy_has_the_layers_of_its_model(run):
    deepseek = replace(catalog.model("deepseek-v3"), num_mtp_layers=0)
    model = shrink(replace(run, model=deepseek), Plan(data_shard=64), num_processes=4).run.model
    assert model.attention.kind is AttentionKind.MLA
    assert model.experts is not None
    assert deepseek.experts is not None
    assert (model.num_dense_layers, model.num_moe_layers) == (1, 3)
    assert (model.experts.num_groups, model.experts.router) == (2, deepseek.experts.router)
    build_model(model)
    llama = shrink(run, run.plan, num_processes=4).run.model
    assert llama.attention.num_heads > llama.attention.num_kv_heads == 2


# --- the command ---


@pytest.mark.distributed
def test_a_sound_plan_is_equal(meshwright, run_file):
    outcome = meshwright("rehearse", run_file, "--json", "--set", "parallel.virtual_pipeline=1",
                         "--set", "parallel.schedule=1f1b", "--processes", 2)  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document["equal"] is True
    assert document["changes"] == ["PP 4 -> 2", "TP 8 -> 1", "DP 8 -> 1"]
    assert document["left_out"] == ["TP", "DP"]
    assert document["max_error"]["gradient"] < 1e-5
    assert len(document["comparison"]["gradient_errors"]) > 30
    assert len(document["comparison"]["memory_bytes"]) == 2


@pytest.mark.distributed
def test_processes_that_hang_say_where(run):
    toy = shrink(run, Plan(tensor=2), num_processes=2)
    with pytest.raises(InfeasibleError, match=r"deadlock: not done after 0.01 s; process 0 in \w+\.py:\d+ ") as caught:
        rehearse(toy.run, toy.plan, timeout_s=0.01)
    assert caught.value.exit_code == 1
    assert "parent_watch.py" not in str(caught.value)  # the thread that watches is no place of a deadlock


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_a_difference_is_a_no(meshwright, run_file, monkeypatch, error):
    wrong = replace(EQUAL, gradient_errors={"a": 0.0, "head.weight": error})
    monkeypatch.setattr(rehearsal, "rehearse", lambda *args, **options: wrong)
    outcome = meshwright("rehearse", run_file)
    assert outcome.exit_code == 1
    assert "Not equal to one process" in outcome.stdout
    assert meshwright("rehearse", run_file, "--json").json["equal"] is False


def test_what_is_scaled_and_left_out_is_printed(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda *args, **options: EQUAL)
    outcome = meshwright("rehearse", run_file)
    assert outcome.exit_code == 0, outcome.stderr
    assert "Scaled: PP 4 -> 2, TP 8 -> 2, DP 8 -> 1, VPP 5 -> 2." in outcome.stdout
    assert "no room for DP in 4 processes: not rehearsed" in outcome.stderr


def test_an_open_plan_is_the_planners(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda *args, **options: EQUAL)
    outcome = meshwright(
        "rehearse", run_file, "--set", "model=llama3.1-8b", "--set", "parallel=auto", "--set", "cluster=h100-8x1",
        "--json",
    )  # fmt: skip
    if outcome.exit_code == 0:
        assert outcome.json["plan"]["data_shard"] > 1
    else:
        assert "the native engine cannot run" in outcome.stderr


def test_what_the_engine_cannot_run_is_a_no(meshwright, run_file):
    outcome = meshwright("rehearse", run_file, "--set", "stack.offloaded_activations=1")  # of a pipeline
    assert outcome.exit_code == 1
    assert "stack.offloaded_activations: layers of a pipeline" in outcome.stderr


def test_a_run_without_plan_and_cluster_has_none_to_rehearse(meshwright, run_file):
    outcome = meshwright("rehearse", run_file, "--set", "parallel=auto", "--set", "cluster=here")
    assert outcome.exit_code == 2
    assert "pins none and names no cluster" in outcome.stderr


def test_without_torch_it_says_how_to_install_it(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: None)
    outcome = meshwright("rehearse", run_file)
    assert outcome.exit_code == 3
    assert f"hint: {install_command('torch')}" in outcome.stderr


def test_formats_of_another_engine_do_not_forbid_a_rehearsal(run):
    """TRL trains in bf16 alone, and a rehearsal in fp32, on the native engine."""
    other = replace(run, engine="trl", plan=Plan(data_shard=2, sharding=Sharding.NONE))
    _require_possible(other, other.plan)
