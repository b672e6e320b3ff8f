"""Recomputation changes no bit, frees what the cost model says it frees, and counts nothing twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.kernel_cases import demanding, needs_interpreter
from tests.processors import pretend, without_amx
from tests.tiny_runs import tiny_run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.calibration.memory import memory_constants
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.memory.activations import layer_bytes
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.engines.native import output_recomputation
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.recompute import recompute
from meshwright.kernels import processor
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.training.models import build_model, experts, init_weights

WIDER = ("model.hidden=64", "model.ffn_hidden=192", "model.num_layers=2", "batch.micro=2")
MODELS = {
    "dense": (),
    # Widths of queries and values are equal: other ones have no fused kernel on a CPU, which then copies what it keeps.
    "latent": (
        "model.attention={kind: mla, num_heads: 4, head_dim: 32, value_head_dim: 32, "
        "query_lora_rank: 24, kv_lora_rank: 24, rope_head_dim: 8}",
    ),
    "experts": ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 96, num_shared: 1, router: sigmoid}",),
}
SETS = {
    "dense": [
        ("core_attention",),
        ("norm",),
        ("activation",),
        ("norm", "activation"),
        ("mlp",),
        ("norm", "mlp"),
        ("alternate_matmuls",),
    ],
    "latent": [("mla_up_projection",), ("norm", "activation", "mla_up_projection")],
    "experts": [
        ("activation",),
        ("moe",),
        ("norm", "moe"),
        ("shared_experts",),
        ("norm", "activation", "shared_experts"),
        ("alternate_matmuls",),
    ],
}
CASES = [(model, names) for model, sets in SETS.items() for names in sets]
NUM_TOKENS = 2 * 16


def run_of(model: str):
    return tiny_run(*WIDER, *MODELS[model])


def selective(*names: str, **axes) -> Plan:
    return Plan(recompute=Recompute.SELECTIVE, recompute_modules=names, **axes)


class Kept(TorchDispatchMode):
    """Bytes of tensors that were made while it was active and still exist."""

    def __init__(self, *before):
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.made = {}

    def __torch_dispatch__(self, operation, types, inputs=(), named=None):
        outputs = operation(*inputs, **(named or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return outputs

    def num_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def one_layer(model: str, plan: Plan):
    """Gradients of a layer, bytes it kept for them, and what its router counted."""
    built = build_model(run_of(model).model, device="cpu")
    init_weights(built, seed=1)
    layer = built.layers["0"]
    recompute([layer], plan=plan)
    torch.manual_seed(0)
    x_BTD = torch.randn(2, 16, 64, requires_grad=True)
    layout = built.layout(torch.arange(16).expand(2, -1), None)
    with Kept(x_BTD, layout.full.cos_BT1J, layout.full.sin_BT1J, *layer.parameters()) as kept:
        out_BTD = layer(x_BTD, layout)
        size = kept.num_bytes() - out_BTD.untyped_storage().nbytes()
    out_BTD.square().sum().backward()
    loads = [b.clone() for name, b in layer.named_buffers() if name.endswith("load_E")]
    return [x_BTD.grad, *(p.grad for p in layer.parameters())], size, loads


def claimed_bytes(model: str, plan: Plan) -> float:
    """Bytes that a layer keeps by the cost model; it counts two bytes an element, these tests compute in four."""
    run = run_of(model)
    table = model_row(run.model)
    batch = BatchTable(global_batch=2, seq_len=16)
    found = layer_bytes(
        table,
        batch,
        plan_row(plan),
        precision_row(PRECISIONS["bf16"]),
        memory_constants(run.stack),
        np.asarray(NUM_TOKENS),
    )
    return 2 * float(found.moe if model == "experts" else found.dense)


@pytest.fixture
def _fused(monkeypatch):
    """Attention by a kernel that writes no scores, and experts without rows of zeros, as on a GPU; the CPU's own blocks
    keep scores, and its GEMMs want few sizes."""
    monkeypatch.setattr(experts, "compiles_shapes", lambda matrix: False)
    with demanding(attention="sdpa"):
        yield


def test_scores_that_a_kernel_keeps_are_freed(monkeypatch):
    without_amx(monkeypatch)
    with demanding(attention="blockwise"):
        expected, before, _ = one_layer("dense", Plan())
        gradients, after, _ = one_layer("dense", selective("core_attention"))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert before - after >= 4 * 4 * 16 * NUM_TOKENS  # 4 heads, 16 keys, fp32


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize(("model", "names"), CASES)
def test_recomputation_changes_no_bit_and_frees_what_is_claimed(model, names):
    plan = selective(*names)
    expected, before, loads = one_layer(model, Plan())
    gradients, after, loads_again = one_layer(model, plan)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(loads_again, loads, strict=True))
    claimed = claimed_bytes(model, Plan()) - claimed_bytes(model, plan)
    # More than claimed, never less: PyTorch's own product keeps silu(gate) too, its norm a copy, gathers their indices.
    assert claimed <= before - after
    assert before - after <= 2 * claimed + 16 * NUM_TOKENS


def test_a_recomputable_norm_is_all_that_is_claimed_and_nothing_else():
    _, before, _ = one_layer("dense", Plan())
    _, after, _ = one_layer("dense", selective("norm"))
    assert before - after == 2 * NUM_TOKENS * 64 * 4  # two outputs of 64 widths in fp32


@needs_interpreter
@pytest.mark.parametrize("names", [("norm",), ("norm", "mlp")], ids=["norm", "norm and mlp"])
def test_a_norm_with_the_addition_before_it_is_recomputed_from_the_sum(names):
    """The kernel of both, and that of the norm alone, give the same bits."""
    with demanding(rms_norm="triton"):
        expected, _, _ = one_layer("dense", Plan())
        gradients, _, _ = one_layer("dense", selective(*names))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_full_keeps_the_input_alone():
    _, before, loads = one_layer("experts", Plan())
    _, after, loads_again = one_layer("experts", Plan(recompute=Recompute.FULL))
    assert after < before / 5
    assert torch.equal(loads_again[0], loads[0])


def test_layers_of_a_rank_are_counted_over_its_stages():
    built = build_model(replace(run_of("dense").model, num_layers=4))
    layers = list(built.layers.values())
    plan = Plan(pipeline=2, virtual_pipeline=2, recompute=Recompute.FULL, recompute_layers=3)
    recompute(layers[:2], plan=plan)
    recompute(layers[2:], plan=plan, num_before=2)
    assert ["forward" in vars(layer) for layer in layers] == [True, True, True, False]


def test_an_output_is_made_again_once_for_all_its_consumers():
    calls = []

    def function(x):
        calls.append(1)
        return x * 2

    x, weight = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    with output_recomputation.recomputing_outputs():
        y = output_recomputation.recomputed(function, x)
        z = y @ weight + (y.T @ weight) * (y @ weight)
    del y
    z.sum().backward()
    assert len(calls) == 2
    assert torch.equal(weight.grad, torch.full((3, 3), 78.0))


def test_a_function_that_saves_its_inputs_alone_runs_twice_and_up_to_its_last_saved_tensor():
    calls = []

    def function(x, weight):
        calls.append("begins")
        y = (x @ weight).exp() @ weight
        calls.append("ends")
        return y + 1

    gradients = []
    for computed in (lambda *xs: function(*xs), lambda *xs: output_recomputation.from_inputs(function, *xs)):
        calls.clear()
        x, weight = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(), torch.eye(3).requires_grad_()
        out = computed(x, weight)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        gradients.append((x.grad, weight.grad))
    assert calls == ["begins", "ends", "begins", "begins"]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_outside_of_a_layer_nothing_is_recomputable():
    x = torch.ones(3, requires_grad=True)
    with output_recomputation.recomputing_outputs():
        y = output_recomputation.recomputed(torch.exp, x)
    assert not output_recomputation._recomputable
    (y * y).sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x).exp())


FSDP = {"data_shard": 2, "sharding": Sharding.PARAMETERS, "micro_batch": 2}
ZB = {"pipeline": 2, "schedule": Schedule.ZERO_BUBBLE, "micro_batch": 2}
PLANS = [(model, selective(*names, **FSDP)) for model, names in CASES]
PLANS += [("dense", selective(name, tensor=2)) for name in ("core_attention", "activation", "mlp", "alternate_matmuls")]
PLANS += [
    ("experts", selective("norm", "moe", data_shard=2, expert=2)),
    ("experts", selective("activation", "shared_experts", tensor=2)),
    ("dense", selective("norm", "core_attention", context=2)),
    ("latent", selective("norm", "activation", "mla_up_projection", **ZB)),
    ("experts", selective("norm", **ZB)),
]
IN_SHORT = [
    ("experts", selective("norm", "activation", "shared_experts", **FSDP)),
    ("dense", selective("norm", "mlp", **FSDP)),
]


@pytest.mark.distributed
@pytest.mark.parametrize("plans", [IN_SHORT, pytest.param(PLANS, marks=pytest.mark.slow)], ids=["short", "all"])
def test_recomputation_composes(plans, equals_one_process):
    equals_one_process([(run_of(model), plan) for model, plan in plans])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (selective(), "names no modules"),
        (selective("moe"), "tiny has no moe"),
        (selective("norm", "alternate_matmuls"), "cannot be combined"),
        (selective("norm", tensor=2), "frees nothing when tensor > 1"),
        (selective("mlp", **ZB), "would compute it twice"),
        (Plan(recompute=Recompute.FULL, **ZB), "would compute it twice"),
    ],
)
def test_what_would_not_be_honoured_is_refused(plan, words):
    assert words in "; ".join(problem.reason for problem in check_plan(plan, run=run_of("dense")))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, operation, types, inputs=(), named=None):
        self.num += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operation(*inputs, **(named or {}))


@pytest.mark.usefixtures("_fused")
def test_recomputation_stops_before_the_last_gemm_of_a_layer(monkeypatch):
    """`stops_recompute` of the stack (`catalog/data/stacks.toml`) says so. GEMMs are PyTorch's, as on a GPU."""
    pretend(monkeypatch, processor.HERE.onednn, is_intel=True)
    counted = []
    for plan in (Plan(), Plan(recompute=Recompute.FULL)):
        built = build_model(run_of("dense").model, device="cpu")
        init_weights(built, seed=1)
        recompute([built.layers["0"]], plan=plan)
        x_BTD = torch.randn(2, 16, 64, requires_grad=True)
        layout = built.layout(torch.arange(16).expand(2, -1), None)
        with Products() as forward:
            out_BTD = built.layers["0"](x_BTD, layout)
        with Products() as backward:
            out_BTD.square().sum().backward()
        counted.append((forward.num, backward.num))
    (forward, backward), (again, with_recompute) = counted
    assert again == forward
    assert with_recompute - backward == forward - 1
    assert stack_facts("native").stops_recompute
