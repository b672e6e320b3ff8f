"""Compiled layers compute what eager ones do, without breaks, and are refused where they cannot be."""

from __future__ import annotations

import os
import shutil

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import SHARED_EXPERT, tiny_run
from torch._dynamo.utils import counters

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.check import check_plan
from meshwright.errors import MissingDependencyError
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding

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
def test_one_graph_for_equal_layers_and_no_break(tmp_path):
    """The sample that a run ends with grows by a token at a time: it compiles nothing anew."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    data = f"data={{source: {tmp_path / 'corpus.txt'}, tokenizer: bytes, sequence_length: 16}}"
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
    assert counters["stats"]["unique_graphs"] == 1  # for three layers
    # The first step compiled: it is not in the statistics, of which warming up leaves out three more.
    assert [record.statistics["step_s"]["n"] for record in records] == [4, 5]


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones(run, moe_run, equals_one_process):
    plans = [Plan(micro_batch=4), Plan(micro_batch=4, recompute=Recompute.FULL)]
    equals_one_process([(run, plan) for plan in plans], tolerance=1e-5)
    equals_one_process([(moe_run, plan) for plan in plans], tolerance=1e-5)


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
