"""Multi-token prediction: every axis equals one process, or is refused with a hint that works."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import LATENT, SHARED_EXPERT, tiny_run

from meshwright import runfile
from meshwright.engines.native.check import check_plan
from meshwright.runfile import pinned_text
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

PREDICTS = ("model.num_mtp_layers=1", "batch.global_sequences=8", "train.mtp_loss_weight=0.5")
V = {"schedule": Schedule.ZBV, "virtual_pipeline": 2}
DENSE = [
    Plan(tensor=2),
    Plan(tensor=2, sequence_parallel=False),
    Plan(pipeline=2, schedule=Schedule.ZERO_BUBBLE),
    Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL),
]
EXPERTS = [
    Plan(data_shard=4, sharding=Sharding.OPTIMIZER, expert=2),
    Plan(pipeline=2, data_shard=2, sharding=Sharding.OPTIMIZER, expert=2, **V),
    Plan(pipeline=2, tensor=2),
]


@pytest.mark.distributed
def test_every_axis_equals_one_process(equals_one_process):
    equals_one_process([(tiny_run(*PREDICTS), plan) for plan in DENSE])


@pytest.mark.distributed
def test_tied_embeddings_have_two_copies(equals_one_process):
    run = tiny_run(*PREDICTS, "model.tied_embeddings=true")
    equals_one_process([(run, Plan(pipeline=2)), (run, Plan(pipeline=2, **V))])


@pytest.mark.distributed
@pytest.mark.slow  # the same ways, with experts and latent attention
def test_every_axis_of_a_mixture_equals_one_process(equals_one_process):
    run = tiny_run(*PREDICTS, SHARED_EXPERT, LATENT)
    equals_one_process([(run, plan) for plan in EXPERTS])


def test_context_ranks_are_refused_by_name_and_the_hint_works():
    run, plan = tiny_run(*PREDICTS[:2]), Plan(context=2)
    (problem,) = [one for one in check_plan(plan, run=run) if "multi-token" in one.reason]
    assert problem.key == "parallel.context"
    without = replace(run, model=replace(run.model, num_mtp_layers=0))
    assert problem.hint == "--set model.num_mtp_layers=0"
    assert check_plan(plan, run=without) == []


def test_a_named_model_is_taken_without_its_modules():
    base = "model: deepseek-v3\ndata: {sequence_length: 4096}\nbatch: {global_sequences: 64, micro: 1}\n"
    base += "cluster: h100-8x1\ntrain: {steps: 2}\nengine: native\n"
    for text, overrides in (
        (base, ["model.num_mtp_layers=0"]),
        (base.replace("model: deepseek-v3", "model: {base: deepseek-v3, num_mtp_layers: 0}"), []),
    ):
        run = runfile.loads(text, overrides=overrides)
        assert (run.model.num_mtp_layers, run.model.family) == (0, "DeepseekV3ForCausalLM")
        again = runfile.loads(pinned_text(run, Plan(data_shard=8, sharding=Sharding.PARAMETERS)))
        assert again.model == run.model
