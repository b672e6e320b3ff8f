"""Multi-token prediction: every axis equals one process, or is refused with a hint that works."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import LATENT, SHARED_EXPERT, tiny_run
from torch.nn.functional import cross_entropy

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.runfile import pinned_text
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.training.models.multi_token import shifted

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


@pytest.mark.when_touched  # test_tied_embeddings_have_two_copies has two stages
@pytest.mark.distributed
def test_every_axis_equals_one_process(equals_one_process):
    equals_one_process([(tiny_run(*PREDICTS), plan) for plan in DENSE])


@pytest.mark.distributed
@pytest.mark.when_touched  # parity/test_multi_token_prediction.py predicts further tokens in one process
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


def test_the_losses_of_the_modules_are_logged(tmp_path):
    """Each is the cross-entropy of its own labels, over all micro-batches."""
    run = tiny_run("model.num_mtp_layers=2", "batch.global_sequences=4", "train.steps=2", "train.checkpoint=null")
    record = engine.train(run, options=TrainOptions(folder=tmp_path / "out", quiet=True))
    steps = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    coordinates = MeshCoordinates(plan=Plan(micro_batch=4), device=torch.device("cpu"))
    parts, loader = assemble(run, coordinates=coordinates), open_batch_loader(run, coordinates=coordinates)
    batch = loader.batch(0)
    expected = []
    h_BTD = parts.modules[0].hidden_states(batch.tensors["tokens_BT"])
    (module,) = parts.modules
    tokens_BT, labels_BT = batch.tensors["tokens_BT"], batch.tensors["labels_BT"]
    for k, one in enumerate(module.predictions.values(), start=1):
        embedded = module.embedding(shifted(tokens_BT, k, fill=0))
        h_BTD = one(embedded, h_BTD, module._layout_of(tokens_BT, None, None))
        logits = module.head(one.norm(h_BTD), None, None)[:, :-k]
        ahead = labels_BT[:, k:]
        expected.append(cross_entropy(logits.flatten(0, 1).float(), ahead.flatten()).item())
    assert steps[0]["prediction_losses"] == pytest.approx(expected, rel=1e-4)
    assert record.statistics["prediction_losses"] == pytest.approx(steps[1]["prediction_losses"], rel=1e-9)
    assert len({steps[0]["loss"], *steps[0]["prediction_losses"]}) == 3


def test_adapters_are_refused_by_name_and_the_hint_works():
    run = tiny_run("model.num_mtp_layers=1", "task=lora")
    (problem,) = [one for one in check(run) if "multi-token" in one.reason]
    assert (problem.key, problem.hint) == ("model.num_mtp_layers", "--set model.num_mtp_layers=0")
    assert not [one for one in check(tiny_run("task=lora")) if "multi-token" in one.reason]
