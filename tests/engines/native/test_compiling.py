"""Compiled layers compute what eager ones do, without breaks, and are refused where they cannot be."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import SHARED_EXPERT, tiny_run
from torch._dynamo.utils import counters

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine, fp8
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.compiling import compile_layers
from meshwright.errors import MissingDependencyError
from meshwright.kernels.fp8.layer import RECIPES
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.training.models import build_model, init_weights

EXPERTS = ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1}", "model.ffn_hidden=0")
COMPILED = ("model.num_layers=3", "batch.micro=4", "train={steps: 8, compile: true}")

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
    # What PyTorch's own compiler imports and says: not of this project.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture
def run():
    return tiny_run(*COMPILED)


@pytest.fixture
def moe_run():
    return tiny_run(*COMPILED, SHARED_EXPERT)


@pytest.mark.slow
@pytest.mark.parametrize(("num_documents", "num_graphs"), [(1, 1), (300, 2)])
def test_one_graph_for_equal_layers_and_no_break(tmp_path, num_documents, num_graphs):
    """The sample that a run ends with grows by a token at a time: it compiles nothing anew.

    Documents make a mask, which random tokens before the first step do not have.
    """
    line = json.dumps({"text": "the fox " * (300 // num_documents)})
    (tmp_path / "corpus.jsonl").write_text(f"{line}\n" * num_documents)
    data = f"data={{source: {tmp_path / 'corpus.jsonl'}, tokenizer: bytes, sequence_length: 16}}"
    torch._dynamo.reset()
    counters.clear()
    losses, records = [], []
    for compiled in (True, False):
        overrides = [data, "model.vocab=257", f"train.compile={str(compiled).lower()}"]
        loaded = tiny_run(*COMPILED, *overrides)
        options = TrainOptions(folder=tmp_path / str(compiled), quiet=True)
        records.append(engine.train(loaded, options=options))
        losses.append([records[-1].statistics[name] for name in ("first_loss", "last_loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert records[0].sample == records[1].sample
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == num_graphs  # for three layers
    # The first step compiled: it is not in the statistics, of which warming up leaves out three more.
    assert [record.statistics["step_s"]["n"] for record in records] == [4, 5]


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones(run, moe_run, equals_one_process):
    plans = [Plan(micro_batch=4), Plan(micro_batch=4, recompute=Recompute.FULL)]
    equals_one_process([(run, plan) for plan in plans], tolerance=1e-5)
    equals_one_process([(moe_run, plan) for plan in plans], tolerance=1e-5)


def trained(monkeypatch, *, backend, precision, experts=False, caches=False, layers=1, steps=2):
    """Losses, gradients and histories of delayed scales after steps of two micro-batches; None: nothing is compiled."""
    widths = EXPERTS if experts else ("model.attention.num_kv_heads=4",)
    run = tiny_run(f"model.num_layers={layers}", *widths)
    model = build_model(run.model, device="cpu")
    init_weights(model, seed=0)
    model.bfloat16()
    blocks = list(model.layers.values())
    if precision in RECIPES:
        fp8.convert(blocks, precision=PRECISIONS[precision], caches_weights=caches)
    scales = fp8.delayed_states([model], device=torch.device("cpu"))
    if backend is not None:
        torch._dynamo.reset()
        counters.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
            compile_layers(blocks, plan=Plan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            tokens_BT = torch.randint(64, (2, 16), generator=draws)
            loss = model(tokens_BT, labels_BT=tokens_BT.roll(-1, 1))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        fp8.end_step(scales, group=None)
        fp8.expire_caches([model])
    histories = [state.amax_history_3H for state in scales.values()]
    return losses, [*[p.grad for p in model.parameters()], *histories]


def assert_same_bits(found, expected, *, num_graphs):
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.when_touched  # test_fp8.py trains the same layers without a compiler
def test_a_traced_layer_in_fp8_has_the_same_bits(monkeypatch):
    """As `compile_layers` demands; nothing is differentiated by the compiler, and no code is generated."""
    case = {"precision": "fp8_delayed", "caches": True}
    expected = trained(monkeypatch, backend=None, **case)
    assert_same_bits(trained(monkeypatch, backend="eager", **case), expected, num_graphs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "experts", "caches"),
    [(name, experts, not experts) for name in ("bf16", *RECIPES) for experts in (False, True)]
    + [("fp8_delayed", False, False), ("fp8_blockwise", True, True)],
)
def test_a_compiled_layer_has_the_same_bits(monkeypatch, precision, experts, caches):
    """The backend that generates no code keeps every operation, and so every bit."""
    case = {"precision": precision, "experts": experts, "caches": caches, "layers": 2}
    expected = trained(monkeypatch, backend=None, **case)
    assert precision != "fp8_delayed" or all(history[:, :2].any() for history in expected[1][-6:])
    assert_same_bits(trained(monkeypatch, backend="aot_eager", **case), expected, num_graphs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "experts"), [("fp8_delayed", False), ("fp8_blockwise", True)], ids=["dense", "experts"]
)
def test_generated_code_in_fp8_is_as_near_as_fp8_is(monkeypatch, precision, experts):
    """Fused operations round to bf16 less often, and a value that rounds to its neighbour in fp8 moves by 1/8."""
    case = {"precision": precision, "experts": experts, "caches": True}
    expected = trained(monkeypatch, backend=None, **case)
    found = trained(monkeypatch, backend="inductor", **case)
    assert found[0] == pytest.approx(expected[0], rel=2e-3)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2, recompute=Recompute.FULL),
        Plan(tensor=2, micro_batch=4),
        Plan(pipeline=2, micro_batch=4),
        Plan(context=2, micro_batch=4),
    ],
    ids=Plan.describe,
)
def test_compiled_layers_compose(run, plan, equals_one_process):
    equals_one_process([(run, plan)], tolerance=1e-5, timeout_s=300)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm",)), "the compiler itself decides"),
        (Plan(pipeline=2, schedule=Schedule.ZERO_BUBBLE), "is one piece"),
    ],
)
def test_what_a_compiled_layer_cannot_do_is_refused(run, plan, words):
    problems = {problem.key: problem.reason for problem in check_plan(plan, run=run)}
    assert words in problems["train.compile"]


def test_without_a_compiler_nothing_starts(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="needs a C\\+\\+ compiler on a CPU: no-such-compiler"):
        engine.train(run, options=TrainOptions(folder=tmp_path / "out", quiet=True))
    assert not (tmp_path / "out").exists()
