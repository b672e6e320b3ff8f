"""The products that are counted are those that a step makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.kernels import linear as linear_module
from meshwright.kernels.linear import BY_ROUTE, GemmKind, GemmRoute, identify_gemm, using_routes
from meshwright.specs.plan import Plan, Recompute
from meshwright.training.gemm_tuning import _by_layer
from meshwright.training.step_gemms import count_gemms

MLA = (
    "model: {name: latent, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 48, attention: {kind: mla, "
    "num_heads: 4, head_dim: 16, value_head_dim: 8, query_lora_rank: 24, kv_lora_rank: 12, rope_head_dim: 4}}"
)


def with_sections(text: str, *sections: str) -> str:
    keys = [section.split(":")[0] for section in sections]
    kept = [line for line in text.splitlines() if line.split(":")[0] not in keys]
    return "\n".join([*kept, *sections])


def made(run, plan: Plan, monkeypatch) -> Counter:
    """Count the GEMMs of one step: every one of the run is routed to a spy."""
    seen: Counter = Counter()

    def spy(x, y):
        kernel, layer = identify_gemm(x, y)
        seen[kernel, layer] += 1
        return x @ y.T

    monkeypatch.setitem(BY_ROUTE, GemmRoute.TORCH, spy)
    monkeypatch.setattr(linear_module, "default_route", lambda dtype: GemmRoute.TORCH)
    assembly = assemble(run, coordinates=MeshCoordinates(plan=plan, device=torch.device("cpu")))
    tokens = torch.randint(run.model.vocab, (run.global_batch, run.sequence_length))
    positions = torch.arange(run.sequence_length).expand(tokens.shape)
    with using_routes(_by_layer(dict.fromkeys(count_gemms(run, plan), GemmRoute.TORCH))):
        batch = {"tokens_BT": tokens, "labels_BT": tokens, "positions_BT": positions}
        assembly.stepper.forward_backward(batch, scale=1.0)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["grouped", "latent"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_what_is_counted_is_what_a_step_makes(tiny_text, precision, model, recompute, monkeypatch):
    sections = [f"precision: {precision}", *([MLA] if model == "latent" else [])]
    run = runfile.loads(with_sections(tiny_text, *sections))
    plan = Plan(micro_batch=2, recompute=recompute)
    expected: Counter = Counter()
    for p, count in count_gemms(run, plan).items():
        expected[p.kernel, (torch.float32 if precision == "fp32" else torch.bfloat16, p.m, p.n, p.k)] += count
    assert made(run, plan, monkeypatch) == expected
    assert {p.format for p in count_gemms(run, plan)} == {precision}


def test_a_frozen_base_has_no_gradients_of_weights(tiny_text, monkeypatch):
    run = runfile.loads(with_sections(tiny_text, "task: lora", "precision: fp32"))
    plan = Plan(micro_batch=2)
    assert {p.kernel for p in count_gemms(run, plan)} == {GemmKind.FORWARD, GemmKind.INPUT_GRADIENT}
    seen = {(kernel, layer[1:]) for kernel, layer in made(run, plan, monkeypatch)}
    assert seen <= {(p.kernel, (p.m, p.n, p.k)) for p in count_gemms(run, plan)}


def test_parallelism_divides_shapes_and_layers(tiny_text):
    run = runfile.loads(tiny_text)
    whole = count_gemms(run, Plan(micro_batch=2))
    divided = count_gemms(run, Plan(micro_batch=2, tensor=2, pipeline=2))
    assert {(p.n, p.k) for p in whole} == {(32, 32), (16, 32), (64, 32), (32, 64)}
    assert {(p.n, p.k) for p in divided} == {(16, 32), (8, 32), (32, 16), (32, 32)}
    forward = [n for p, n in whole.items() if p.kernel is GemmKind.FORWARD]
    assert sum(forward) == 2 * (2 * 7 + 1)  # micro-batches x (layers x linear layers + head)
    halved = [n for p, n in divided.items() if p.kernel is GemmKind.FORWARD]
    assert sum(halved) == 2 * (7 + 1)
    long = count_gemms(replace(run, sequence_length=32), Plan(micro_batch=2, context=2))
    assert {p.m for p in long} == {32}
