"""Linear layers in fp8: which ones, how near to bf16, with what they compose, where they are refused.

No CPU multiplies fp8: torchao rounds the operands and multiplies in fp32, so numerics and wiring are the real ones.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao looks for CUDA libraries
    pytest.importorskip("torchao")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine, fp8
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.rehearsal import rehearse
from meshwright.errors import InputError, MissingDependencyError
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.training import device as devices
from meshwright.training.models import build_model, init_weights

MIXTURE = (
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1}",
    "model.ffn_hidden=0",
)
CPU = torch.device("cpu")


def run_of(*overrides):
    return tiny_run("precision=fp8", "model.attention.num_kv_heads=4", *overrides)


def built(run, precision="bf16"):
    """A model in bf16 with the weights of seed 0; its blocks multiply in `precision`."""
    model = build_model(run.model, device="cpu")
    init_weights(model, seed=0)
    model.bfloat16()
    if precision != "bf16":
        fp8.convert(list(model.layers.values()), precision=PRECISIONS[precision], device=CPU)
    return model


def is_narrow(module):
    return type(module).__name__ == "Float8Linear"


def test_linear_layers_of_blocks_are_converted_and_no_others():
    run = run_of(*MIXTURE)
    model = built(run, "fp8")
    narrow = {name for name, module in model.named_modules() if is_narrow(module)}
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "head"
    }
    assert narrow == linear
    assert {name.partition("layers.0.")[2] for name in narrow if "layers.0." in name} == {
        "attention.query", "attention.key", "attention.value", "attention.output",
        "ffn.shared.gate", "ffn.shared.up", "ffn.shared.down",
    }  # fmt: skip
    assert built(run).state_dict().keys() == model.state_dict().keys()


# A value of 3 mantissa bits is off by up to 1/16, one of 2 (gradients) by up to 1/8; errors of many values half cancel.
@pytest.mark.parametrize(("precision", "gradient_error"), [("fp8", 0.12), ("fp8_rowwise", 0.08)])
def test_outputs_and_gradients_are_as_near_as_fp8_is(precision, gradient_error):
    run = run_of()
    tokens_BT = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = {}
    for name in ("bf16", precision):
        model = built(run, name)
        loss = model(tokens_BT, labels_BT=tokens_BT.roll(-1, 1))
        loss.backward()
        gradients = [p.grad.float().flatten() for p in model.parameters()]
        assert all(g.count_nonzero() for g in gradients)
        found[name] = loss.item(), torch.cat(gradients)
    assert found[precision][0] == pytest.approx(found["bf16"][0], rel=1e-3)
    error = (found[precision][1] - found["bf16"][1]).norm() / found["bf16"][1].norm()
    assert 0.005 < error < gradient_error  # not zero: it is fp8


@pytest.fixture(scope="module")
def alone():
    return {
        name: rehearse(run_of(f"precision={name}"), Plan(micro_batch=2)).losses
        for name in ("bf16", "fp8", "fp8_rowwise")
    }


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_training_follows_bf16(alone, precision):
    assert alone[precision] == pytest.approx(alone["bf16"], rel=1e-3)
    assert alone[precision] != alone["bf16"]


def test_recomputation_changes_no_bit(alone):
    assert rehearse(run_of(), Plan(micro_batch=2, recompute=Recompute.FULL)).losses == alone["fp8"]


PLANS = {
    "fp8, fsdp": Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2, recompute=Recompute.FULL),
    "fp8, zero bubble": Plan(pipeline=2, micro_batch=2, schedule=Schedule.ZERO_BUBBLE),
    "fp8_rowwise, tensor": Plan(tensor=2, micro_batch=2),
    "fp8, context": Plan(context=2, micro_batch=2),
}
IN_SHORT = ("fp8, fsdp", "fp8_rowwise, tensor")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [n if n in IN_SHORT else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_a_plan_equals_one_process(name, monkeypatch):
    """Parts of a tensor have scales of their own, so gradients differ by what rounding to fp8 does to one element."""
    monkeypatch.setenv("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    run = run_of(f"precision={name.partition(',')[0]}")
    assert check_plan(PLANS[name], run=run) == []
    found = rehearse(run, PLANS[name])
    assert found.loss_error < 5e-4
    assert found.gradient_error < 0.3, found.gradient_errors


def test_a_cpu_does_not_train_in_fp8(tmp_path):
    with pytest.raises(InputError, match="needs a GPU that multiplies fp8") as raised:
        engine.prepare(run_of(), options=TrainOptions(folder=tmp_path, quiet=True))
    assert raised.value.hint == "train on this device with --set precision=bf16"


@pytest.mark.parametrize(
    ("hip", "capability", "architecture", "expected"),
    [
        (None, (8, 0), "", False),
        (None, (8, 9), "", True),
        (None, (9, 0), "", True),
        (None, (10, 0), "", True),
        ("7.0", (9, 0), "gfx90a:sramecc+:xnack-", False),
        ("7.0", (9, 4), "gfx942:sramecc+:xnack-", True),
        ("7.0", (9, 5), "gfx950:sramecc+:xnack-", True),
    ],
)
def test_which_gpus_multiply_fp8(monkeypatch, hip, capability, architecture, expected):
    class Properties:
        gcnArchName = architecture

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert devices.multiplies_fp8(torch.device("cuda")) is expected


def test_without_torchao_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    fp8.require(PRECISIONS["fp8"], device=CPU)
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="needs torchao") as raised:
        fp8.require(PRECISIONS["fp8"], device=CPU)
    assert raised.value.hint == "pip install 'meshwright[fp8]'"
    fp8.require(PRECISIONS["bf16"], device=CPU)


def test_the_product_that_is_timed_multiplies():
    assert torch.equal(devices._fp8_gemm(32, CPU)(), torch.full((32, 32), 32.0, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("overrides", "plan", "words"),
    [
        (
            ("model.hidden=40", "model.attention={num_heads: 4, num_kv_heads: 4, head_dim: 8}"),
            Plan(),
            "40 hidden",
        ),
        ((), Plan(tensor=4), "a rank has 8 query widths"),
        (("data.sequence_length=8",), Plan(), "8 tokens of a micro-batch"),
        (("data.sequence_length=32",), Plan(context=4), "8 tokens of a micro-batch"),
    ],
)
def test_widths_that_fp8_cannot_have_are_refused(overrides, plan, words):
    run = run_of(*overrides)
    assert words in " ".join(map(str, check_plan(plan, run=run)))
    assert not [
        p for p in check_plan(plan, run=replace(run, precision=PRECISIONS["bf16"])) if p.key == "precision"
    ]


@pytest.mark.parametrize("precision", ["fp16", "fp8_blockwise", "mxfp8", "nvfp4", "mxfp4"])
def test_other_recipes_are_refused(precision):
    problems = check(run_of(f"precision={precision}"))
    assert [p.key for p in problems] == ["precision"]
    assert "allowed: fp32, bf16, fp8, fp8_rowwise" in (problems[0].hint or "")


def test_adapters_are_not_trained_in_fp8():
    assert any("adapters" in str(p) for p in check(run_of("task=lora")))


def test_the_record_says_that_routed_experts_stay_in_bf16():
    assert fp8.notes(run_of()) == []
    assert "routed experts multiply in bf16" in fp8.notes(run_of(*MIXTURE))[0]
    assert fp8.notes(run_of(*MIXTURE, "precision=bf16")) == []
