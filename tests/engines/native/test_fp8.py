"""Linear layers in 8 and 4 bits: which ones, how near to bf16, with what they compose, where they are refused.

No CPU multiplies fp8: operands are rounded and multiplied in fp32, so numerics and wiring are the real ones.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from tests.tiny_runs import tiny_run

from meshwright.engines.base import Measuring, TrainOptions
from meshwright.engines.native import engine, fp8
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.rehearsal import rehearse, rehearse_each
from meshwright.errors import InputError
from meshwright.kernels.fp8.layer import RECIPES, Fp8State
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.training import device as devices
from meshwright.training.models import build_model, init_weights
from meshwright.training.models.feed_forward import FeedForward

pytestmark = pytest.mark.usefixtures("without_measuring")

MIXTURE = ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1}", "model.ffn_hidden=0")
CPU = torch.device("cpu")
SHALLOW = "model.num_layers=2"


def run_of(*overrides):
    return tiny_run("precision=fp8", "model.attention.num_kv_heads=4", *overrides)


def built(run, precision="bf16"):
    """A model in bf16 with the weights of seed 0; its blocks multiply in `precision`."""
    model = build_model(run.model, device="cpu")
    init_weights(model, seed=0)
    model.bfloat16()
    if precision != "bf16":
        fp8.convert(list(model.layers.values()), precision=PRECISIONS[precision])
    return model


def is_narrow(module):
    return bool(list(fp8.states_of([module]))) and isinstance(module, torch.nn.Linear)


def test_linear_layers_of_blocks_are_converted_and_no_others():
    run = run_of(*MIXTURE)
    model = built(run, "fp8")
    narrow = {name for name, module in model.named_modules() if is_narrow(module)}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "head"}
    assert narrow == linear
    assert {name.partition("layers.0.")[2] for name in narrow if "layers.0." in name} == {
        "attention.query", "attention.key", "attention.value", "attention.output",
        "ffn.shared.gate", "ffn.shared.up", "ffn.shared.down",
    }  # fmt: skip
    names = {name for name, _ in fp8.named_states([model])}
    assert {f"layers.{i}.ffn.experts.{name}" for i in range(4) for name in ("gate", "up", "down")} == names - narrow
    assert built(run).state_dict().keys() == model.state_dict().keys()


# A value of 3 mantissa bits is off by up to 1/16, one of 2 (gradients) by up to 1/8; errors of many values half cancel.
@pytest.mark.parametrize(
    ("precision", "gradient_error"),
    [("fp8", 0.12), ("fp8_rowwise", 0.08), ("fp8_blockwise", 0.08), ("mxfp8", 0.12), ("mxfp4", 0.5)],
)
@pytest.mark.parametrize("model", [(), MIXTURE], ids=["dense", "experts"])
def test_outputs_and_gradients_are_as_near_as_fp8_is(precision, gradient_error, model):
    run = run_of(*model)
    tokens_BT = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = {}
    for name in ("bf16", precision):
        model = built(run, name)
        loss = model(tokens_BT, labels_BT=tokens_BT.roll(-1, 1))
        loss.backward()
        gradients = [p.grad.float().flatten() for p in model.parameters()]
        assert all(g.count_nonzero() for g in gradients) or model
        found[name] = loss.item(), torch.cat(gradients)
    assert found[precision][0] == pytest.approx(found["bf16"][0], rel=4e-3 if precision == "mxfp4" else 1e-3)
    error = (found[precision][1] - found["bf16"][1]).norm() / found["bf16"][1].norm()
    assert 0.005 < error < gradient_error  # not zero: it is fp8


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_blockwise", "mxfp8"])
def test_a_fused_feed_forward_block_trains_like_three_layers(precision):
    tokens_BT = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = {}
    for is_fused in (True, False):
        model = built(run_of(), precision)
        blocks = [module for module in model.modules() if isinstance(module, FeedForward)]
        assert len(blocks) == 4
        assert all(block.fp8_states for block in blocks)
        if not is_fused:
            for block in blocks:
                block.fp8_states = None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        found[is_fused] = []
        for _ in range(3):
            loss = model(tokens_BT, labels_BT=tokens_BT.roll(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for state in fp8.states_of([model]):
                state.end_step()
            found[is_fused].append(loss.item())
    assert found[True] == found[False]
    assert found[True][-1] < 0.99 * found[True][0]


@pytest.fixture(scope="module")
def alone():
    names = ("bf16", *RECIPES)
    found = rehearse_each([(run_of(SHALLOW, f"precision={name}"), Plan(micro_batch=2)) for name in names])
    return {name: result.losses for name, result in zip(names, found, strict=True)}


@pytest.mark.parametrize("precision", RECIPES)
def test_training_follows_bf16(alone, precision):
    assert alone[precision] == pytest.approx(alone["bf16"], rel=1e-2 if precision == "mxfp4" else 1e-3)
    assert alone[precision] != alone["bf16"]


@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed"])
def test_recomputation_changes_no_bit(alone, precision):
    run = run_of(SHALLOW, f"precision={precision}")
    assert rehearse(run, Plan(micro_batch=2, recompute=Recompute.FULL)).losses == alone[precision]


PLANS = {
    "fp8, fsdp": Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2, recompute=Recompute.FULL),
    "fp8, zero bubble": Plan(pipeline=2, micro_batch=2, schedule=Schedule.ZERO_BUBBLE),
    "fp8_rowwise, tensor": Plan(tensor=2, micro_batch=2),
    "fp8, context": Plan(context=2, micro_batch=2),
    "fp8_delayed, data": Plan(data_shard=2, micro_batch=2),
    "fp8_delayed, tensor": Plan(tensor=2, micro_batch=2),
    "fp8_delayed, experts": Plan(data_shard=2, expert=2, micro_batch=2),
    "fp8_blockwise, experts": Plan(data_shard=2, expert=2, sharding=Sharding.PARAMETERS, micro_batch=2),
    "fp8_rowwise, expert widths": Plan(
        data_shard=2, expert=1, expert_tensor=2, tensor=2, sequence_parallel=True, micro_batch=2
    ),
    "mxfp8, fsdp": Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
}
IN_SHORT = "fp8_delayed, experts"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        IN_SHORT,
        pytest.param("fp8, fsdp", marks=pytest.mark.when_touched),
        *(pytest.param(n, marks=pytest.mark.slow) for n in PLANS if n not in (IN_SHORT, "fp8, fsdp")),
    ],
)
def test_a_plan_equals_one_process(name):
    """Parts of a tensor have scales of their own, so gradients differ by what rounding to fp8 does to one element."""
    run = run_of(f"precision={name.partition(',')[0]}", *(MIXTURE if "expert" in name else ()))
    assert check_plan(PLANS[name], run=run) == []
    found = rehearse(run, PLANS[name])
    assert found.loss_error < 5e-4
    assert statistics.median(found.gradient_errors.values()) < 0.1
    if "expert" not in name:  # a token that rounding sends to another expert changes that expert's gradient by half
        assert found.gradient_error < 0.3, found.gradient_errors


@pytest.mark.parametrize("precision", RECIPES)
def test_a_cpu_emulates_and_the_record_says_so(tmp_path, precision):
    prepared = engine.prepare(
        run_of(f"precision={precision}", "batch.micro=2", "train.steps=1"),
        options=TrainOptions(folder=tmp_path, quiet=True, measuring=Measuring.NEVER),
    )
    assert any(note.startswith(f"{precision} is emulated on this device") for note in prepared.notes)
    expected = engine.expected(prepared)
    assert expected.predicted is None
    assert expected.yardstick.mfu(1.0) is None
    assert expected.notes == (f"nothing was predicted: this device emulates {precision}",)


@pytest.mark.parametrize(
    ("precision", "architecture", "words"),
    [
        ("fp8", "gfx90a", "needs a GPU that multiplies fp8"),
        ("mxfp8", "gfx942", "this GPU has other 8-bit formats than MX"),
        ("mxfp8", "gfx950", None),
        ("fp8_delayed", "gfx942", None),
    ],
)
def test_a_gpu_without_the_format_is_refused(monkeypatch, precision, architecture, words):
    class Properties:
        gcnArchName = architecture

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    device = torch.device("cuda")
    if words is None:
        fp8.require(PRECISIONS[precision], device=device)
        return
    with pytest.raises(InputError, match=words) as raised:
        fp8.require(PRECISIONS[precision], device=device)
    assert "--set precision=" in (raised.value.hint or "")


def saving(folder, steps, *overrides):
    return run_of(
        SHALLOW, "precision=fp8_delayed", "batch.micro=2", "optimizer.schedule=constant", f"train.steps={steps}",
        f"train.checkpoint={{folder: {folder}, every_steps: 2}}", *overrides,
    )  # fmt: skip


def trained(run, folder, **options):
    options = TrainOptions(folder=folder, quiet=True, measuring=Measuring.NEVER, **options)
    engine.train(run, options=options)
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


# The histories are read without a process group.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.when_touched  # test_resume.py resumes; kernels/fp8 keeps scales
def test_a_resumed_run_has_the_scales_of_the_undisturbed_one(tmp_path):
    whole = trained(saving(tmp_path / "a", 4), tmp_path / "whole")
    trained(saving(tmp_path / "b", 2), tmp_path / "cut")
    history = histories_in(tmp_path / "b")
    assert history
    assert all(bool((rows[:, :2] > 0).all()) and not rows[:, 2:].any() for rows in history.values())
    assert trained(saving(tmp_path / "b", 4), tmp_path / "cut", resume=True) == whole


def histories_in(folder):
    """The histories in the newest checkpoint of `folder`."""
    import torch.distributed.checkpoint as dcp

    (path,) = [p for p in folder.iterdir() if p.name == "step-00000002"]
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {n: torch.empty(tuple(m.size)) for n, m in stored.items() if n.startswith(fp8.CHECKPOINTED)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    return found


def test_another_precision_resumes_and_its_history_begins_anew(tmp_path):
    trained(saving(tmp_path / "a", 2, "precision=bf16"), tmp_path / "run")
    assert len(trained(saving(tmp_path / "a", 3), tmp_path / "run", resume=True)) == 3


def test_largest_magnitudes_are_those_of_all_processes(monkeypatch):
    states = {name: Fp8State(RECIPES["fp8_delayed"]) for name in ("a", "b")}
    for state in states.values():
        state.allocate(CPU)
        state.amax_3.fill_(1.0)

    def of_the_other(largest, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        largest.copy_(torch.maximum(largest, torch.tensor([[3.0, 0.5, 0.5], [0.0, 0.0, 7.0]])))

    monkeypatch.setattr(torch.distributed, "all_reduce", of_the_other)
    fp8.end_step(states, group=object())
    assert states["a"].amax_history_3H[:, 0].tolist() == [3.0, 1.0, 1.0]
    assert states["b"].amax_history_3H[:, 0].tolist() == [1.0, 1.0, 7.0]
    assert not states["a"].amax_3.any()


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


def test_weights_are_cast_once_a_step_with_several_micro_batches():
    model = built(run_of())
    fp8.convert(list(model.layers.values()), precision=PRECISIONS["fp8_rowwise"], caches_weights=True)
    tokens_BT = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens_BT, labels_BT=tokens_BT.roll(-1, 1)).item() for _ in range(2)]
    assert losses[0] == losses[1]
    held = sum(state.num_bytes for state in fp8.states_of([model]))
    numbers = sum(layer.weight.numel() for layer in model.modules() if is_narrow(layer))
    assert 2 * numbers < held < 2.6 * numbers  # narrow layers: a scale for each of 32 and of 64 values
    fp8.expire_caches([model])
    assert not any(state.num_bytes for state in fp8.states_of([model]))


@pytest.mark.when_touched  # kernels/fp8 caches weights of single layers
def test_training_with_the_weight_cache_equals_training_without():
    cached, cast = (
        rehearse(run_of(SHALLOW, "precision=fp8", f"kernels.weight_cache={cache}"), Plan(micro_batch=1)).losses
        for cache in ("on", "off")
    )
    assert cached == cast


def test_the_product_that_is_timed_multiplies():
    assert torch.equal(devices._fp8_gemm(32, CPU)(), torch.full((32, 32), 32.0, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("overrides", "plan", "words"),
    [
        (("model.hidden=40", "model.attention={num_heads: 4, num_kv_heads: 4, head_dim: 8}"), Plan(), "40 hidden"),
        ((), Plan(tensor=4), "a rank has 8 query widths"),
        (("data.sequence_length=8",), Plan(), "8 tokens of a micro-batch"),
        (("data.sequence_length=32",), Plan(context=4), "8 tokens of a micro-batch"),
    ],
)
def test_widths_that_fp8_cannot_have_are_refused(overrides, plan, words):
    run = run_of(*overrides)
    assert words in " ".join(map(str, check_plan(plan, run=run)))
    assert not [p for p in check_plan(plan, run=replace(run, precision=PRECISIONS["bf16"])) if p.key == "precision"]


def test_groups_of_mx_are_whole():
    assert "16 tokens of a micro-batch" in str(check_plan(Plan(), run=run_of("precision=mxfp8"))[0])
    assert check_plan(Plan(micro_batch=2), run=run_of("precision=mxfp8")) == []


@pytest.mark.parametrize("precision", ["fp16", "nvfp4"])
def test_other_recipes_are_refused(precision):
    problems = check(run_of(f"precision={precision}"))
    assert [p.key for p in problems] == ["precision"]
    trained = "fp32, bf16, fp8, fp8_delayed, fp8_rowwise, fp8_blockwise, mxfp8, mxfp4"
    assert f"that devices and engine run: {trained}" in (problems[0].hint or "")


def test_adapters_are_not_trained_in_fp8():
    assert any("adapters" in str(p) for p in check(run_of("task=lora")))


def test_the_record_says_what_is_not_in_fp8():
    whole = Plan(micro_batch=run_of().global_batch)
    assert "embedding, head" in fp8.notes(run_of(), whole, device=CPU)[0]
    assert "tokens sent" not in fp8.notes(run_of(*MIXTURE), whole, device=CPU)[0]
    assert "tokens sent to experts" in fp8.notes(run_of(*MIXTURE), replace(whole, expert=2), device=CPU)[0]
    assert fp8.notes(run_of(*MIXTURE, "precision=bf16"), Plan(), device=CPU) == []
