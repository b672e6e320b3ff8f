"""Activations in host memory change no bit, are the bytes that the cost model counts, and leave two layers here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.engines.native.test_recompute import MODELS, claimed_bytes, run_of, selective
from tests.kernel_cases import demanding
from tests.tiny_runs import tiny_run

from meshwright.cost.tables import plan_row
from meshwright.engines.native import offloaded_activations
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.offloaded_activations import num_offloaded, offload_activations
from meshwright.engines.native.recompute import recompute
from meshwright.planner.request import request_for
from meshwright.planner.screen import cost_model
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.training.host_memory import HostCopies
from meshwright.training.models import build_model, init_weights

CPU = torch.device("cpu")
FULL = Plan(recompute=Recompute.FULL)
NUM_LAYERS = 6


@pytest.fixture
def copied(monkeypatch):
    """Bytes that each layer has copied to host memory; nothing is too small."""
    monkeypatch.setattr(offloaded_activations, "LEAST_BYTES", 1)
    found, store = [], HostCopies.store

    def counted(self, targets, sources):
        found.append(sum(source.nbytes for source in sources))
        return store(self, targets, sources)

    monkeypatch.setattr(HostCopies, "store", counted)
    return found


def gradients(model: str, plan: Plan, *, share: float):
    built = build_model(replace(run_of(model).model, num_layers=NUM_LAYERS), device="cpu")
    init_weights(built, seed=1)
    recompute(list(built.layers.values()), plan=plan)
    offload_activations(list(built.layers.values()), share=share, device=CPU)
    for step in range(2):  # micro-batches
        tokens_BT = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        built(tokens_BT, labels_BT=tokens_BT).backward()
    return [p.grad for p in built.parameters()]


CASES = [(model, plan) for model in MODELS for plan in (Plan(), FULL)]
CASES += [("dense", selective("core_attention")), ("dense", selective("mlp")), ("experts", selective("moe"))]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_gradients_are_the_same(model, plan, copied):
    here = gradients(model, plan, share=0.0)
    assert copied == []
    for share in (0.6, 1.0):
        there = gradients(model, plan, share=share)
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        assert len(copied) == 2 * num_offloaded(NUM_LAYERS, share=share)
        copied.clear()


@pytest.mark.parametrize(("model", "plan"), [("dense", FULL), ("latent", FULL), ("experts", FULL)])
def test_the_planner_counts_the_bytes_of_a_layer(model, plan, copied):
    with demanding(attention="sdpa"):  # a kernel that writes no scores, as on a GPU
        gradients(model, plan, share=1.0)
    assert copied == pytest.approx([claimed_bytes(model, plan)] * len(copied), rel=0.01)


def test_two_layers_are_on_the_device_at_once(copied, monkeypatch):
    layers, counts = [], []
    leave, init = (getattr(offloaded_activations.LayerActivations, name) for name in ("leave", "__init__"))

    def begin(self, *args, **named):
        init(self, *args, **named)
        layers.append(self)

    def counted(self):
        leave(self)
        counts.append(sum(any(m.here is not None for m in layer.memories.values()) for layer in layers))

    monkeypatch.setattr(offloaded_activations.LayerActivations, "__init__", begin)
    monkeypatch.setattr(offloaded_activations.LayerActivations, "leave", counted)
    gradients("dense", FULL, share=1.0)
    assert counts == [1, 1, 1, 0] * 2  # before the next layer runs
    assert not any(list(layer.memories) for layer in layers)  # nothing outlives its backward pass


def with_share(*overrides: str):
    return tiny_run("stack.offloaded_activations=1", *overrides)


@pytest.mark.parametrize(
    ("plan", "overrides", "words"),
    [
        (Plan(pipeline=2), (), "pipeline"),
        (selective("norm"), (), "is combined with recomputation"),
        (Plan(recompute=Recompute.FULL, recompute_layers=1), (), "is combined with recomputation"),
        (Plan(), ("train.compile=true",), "a compiled layer"),
        (FULL, (), ""),
        (Plan(context=2, data_shard=2), (), ""),
    ],
)
def test_what_would_not_be_honoured_is_refused(plan, overrides, words):
    found = "; ".join(problem.reason for problem in check_plan(plan, run=with_share(*overrides)))
    assert words in found if words else not found


def test_a_recomputed_layer_is_timed_by_its_input():
    """With a slow link a copy takes the time of its bytes: those that the layer keeps."""
    run = with_share("model.hidden=128", "model.ffn_hidden=512", "cluster=h100-1x1")
    request = request_for(run)
    slow = replace(request.cluster.accelerator, host_bytes_per_s=1.0)
    model = cost_model(replace(request, cluster=replace(request.cluster, accelerator=slow)))
    full, none = (float(np.ravel(model.steps(plan_row(plan)).components_s["offload"])[0]) for plan in (FULL, Plan()))
    assert 0 < full < none / 4


FSDP = Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plans",
    [
        # test_gradients_are_the_same offloads every layer in one process
        pytest.param([replace(FSDP, recompute=Recompute.FULL)], marks=pytest.mark.when_touched),
        pytest.param([FSDP, Plan(tensor=2), Plan(tensor=2, recompute=Recompute.FULL)], marks=pytest.mark.slow),
        pytest.param([Plan(context=2), Plan(context=2, recompute=Recompute.FULL)], marks=pytest.mark.slow),
    ],
    ids=["short", "tensor", "context"],
)
def test_offloading_composes(plans, equals_one_process):
    """Long sequences, so that activations are large enough to be copied."""
    run = with_share("data.sequence_length=1024")
    equals_one_process([(run, plan) for plan in plans], tolerance=1e-5)
