"""Optimizers by name: steps of the libraries that they are from, states, exact resumption, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

torch = pytest.importorskip("torch")
import torch.nn as nn
from tests.rounding import assert_equals
from tests.tiny_runs import tiny_run

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.check import check
from meshwright.errors import MissingDependencyError, RunFileError
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.training import optimizer_updates
from meshwright.training.masters import masters_of
from meshwright.training.models import build_model, init_weights
from meshwright.training.optimizer import MasterOptimizer
from meshwright.training.weights import save_weights

WIDTH = 64  # a square has 4096 values: the least that torchao keeps in 8 bits
RATE = 1e-2


class Toy(nn.Module):
    """Kinds of parameters of a transformer: tables, matrices of hidden layers, a stack of experts, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleDict({"0": nn.Linear(WIDTH, WIDTH), "1": nn.Linear(WIDTH, 16)})
        self.experts = nn.Parameter(torch.randn(3, 16, 8) / 4)
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.head(torch.einsum("ti,eio->to", x, self.experts))


def lion(settings, model):
    library = pytest.importorskip("lion_pytorch")
    matrices, vectors = groups_of(model)
    s = settings
    return [
        library.Lion(matrices, lr=RATE, betas=s.betas, weight_decay=s.weight_decay),
        library.Lion(vectors, lr=RATE, betas=s.betas, weight_decay=0.0),
    ]


def adamw8bit(settings, model):
    optim = pytest.importorskip("torchao.optim")
    matrices, vectors = groups_of(model)
    same = {"lr": RATE, "betas": settings.betas, "eps": settings.epsilon}
    return [
        optim.AdamW8bit(matrices, weight_decay=settings.weight_decay, **same),
        optim.AdamW8bit(vectors, weight_decay=0.0, **same),
    ]


def muon(settings, model):
    """`torch.optim.Muon` takes matrices alone: each expert is one."""
    s = settings
    hidden = [layer.weight for layer in model.layers.values()]
    experts = [nn.Parameter(matrix.clone()) for matrix in model.experts.detach()]
    model.matrices_of_experts = experts
    tables, vectors = [model.embedding.weight, model.head.weight], [b.bias for b in model.layers.values()]
    adamw = {"lr": s.adamw_learning_rate or RATE, "betas": s.betas, "eps": s.epsilon, "fused": True}
    return [
        torch.optim.Muon(
            hidden + experts, lr=RATE, weight_decay=s.weight_decay, momentum=s.momentum, nesterov=s.nesterov,
            ns_steps=s.newton_schulz_steps, adjust_lr_fn=s.adjust_learning_rate.value,
        ),
        torch.optim.AdamW(tables, weight_decay=s.weight_decay, **adamw),
        torch.optim.AdamW(vectors, weight_decay=0.0, **adamw),
    ]  # fmt: skip


def groups_of(model):
    return [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]


@pytest.mark.parametrize(
    ("library", "settings"),
    [
        (lion, "{name: lion, learning_rate: 0.01}"),
        (lion, "{name: lion, learning_rate: 0.01, betas: [0.8, 0.95], weight_decay: 0.5}"),
        (muon, "{name: muon, learning_rate: 0.01}"),
        (
            muon,
            "{name: muon, learning_rate: 0.01, momentum: 0.9, nesterov: false, newton_schulz_steps: 3, "
            "adjust_learning_rate: original, adamw_learning_rate: 0.02}",
        ),
        pytest.param(adamw8bit, "{name: adamw8bit, learning_rate: 0.01}", marks=pytest.mark.slow),
    ],
    ids=["lion", "lion, other settings", "muon", "muon, other settings", "adamw8bit"],
)
def test_steps_equal_those_of_the_library(library, settings):
    """Bit for bit, on the same gradients."""
    settings = tiny_run(f"optimizer={settings}", "optimizer.gradient_clip=null").optimizer
    torch.manual_seed(0)
    mine, theirs = Toy(), Toy()
    theirs.load_state_dict(mine.state_dict())
    optimizer = MasterOptimizer(masters_of([mine], compute=torch.float32), settings=settings, is_single_process=True)
    references = library(settings, theirs)
    before = mine.layers["0"].weight.detach().clone()
    for _ in range(4):
        mine(torch.randint(32, (24,))).square().sum().backward()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=False):
            b.grad = a.grad.clone()
        for i, matrix in enumerate(getattr(theirs, "matrices_of_experts", [])):
            matrix.grad = mine.experts.grad[i].clone()
        optimizer.step(learning_rate=RATE)
        for reference in references:
            reference.step()
    for name, a in mine.named_parameters():
        b = theirs.get_parameter(name)
        if name == "experts" and library is muon:
            b = torch.stack(list(theirs.matrices_of_experts))
        assert torch.equal(a, b), name
    assert not torch.equal(mine.layers["0"].weight, before)


@pytest.mark.parametrize("name", ["lion", "muon", pytest.param("adamw8bit", marks=pytest.mark.slow)])
def test_the_planner_counts_the_bytes_that_are_kept(name):
    """Of a square matrix, and with Muon of an embedding too."""
    run = tiny_run(f"optimizer={{name: {name}}}")
    torch.manual_seed(0)
    module = nn.ModuleDict({"embedding": nn.Embedding(WIDTH, WIDTH), "layer": nn.Linear(WIDTH, WIDTH, bias=False)})
    optimizer = MasterOptimizer(
        masters_of([module], compute=torch.float32), settings=run.optimizer, is_single_process=True
    )
    kept = {key: t.nbytes for key, t in optimizer.state().items() if not key.startswith("weights.")}
    for part, more in (("embedding", run.precision.adamw_state_bytes), ("layer", 0.0)):
        found = sum(size for key, size in kept.items() if key.endswith(f".{part}.weight"))
        assert found / WIDTH**2 == run.precision.optimizer_state_bytes + more
    assert run.precision.update_bytes < tiny_run().precision.update_bytes


TEXT = """
model: {name: tiny, hidden: 64, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 4}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4}
precision: bf16
cluster: here
optimizer: {name: NAME, learning_rate: 1.0e-3}
train: {steps: 8, checkpoint: {folder: SAVED, every_steps: 4}}
"""


@pytest.fixture
def train(tmp_path, without_measuring, one_thread_and_a_cache, warm_ranks):
    def run(name, *overrides, **options):
        text = TEXT.replace("NAME", name).replace("SAVED", str(tmp_path / "saved"))
        loaded = runfile.loads(text, overrides=overrides)
        return engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True, **options))

    return run


def losses(tmp_path):
    return [json.loads(line)["loss"] for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]


LORA = ("task=lora", "lora={rank: 4, targets: [query, gate]}")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("lion", ()),
        ("muon", ()),
        ("muon", LORA),
        pytest.param("lion", LORA, marks=pytest.mark.slow),
        pytest.param("adamw8bit", (), marks=pytest.mark.slow),
    ],
    ids=["lion", "muon", "muon, adapters", "lion, adapters", "adamw8bit"],
)
def test_a_resumed_run_continues_bit_for_bit(train, tmp_path, name, overrides):
    train(name, *overrides)
    whole = losses(tmp_path)
    assert whole[-1] < whole[0] or overrides
    shutil.rmtree(tmp_path / "saved" / "step-00000008")
    train(name, *overrides, resume=True)
    assert losses(tmp_path) == whole


@pytest.mark.parametrize(
    ("settings", "key", "having"),
    [
        ("{name: lion, epsilon: 1.0e-8}", "epsilon", "adamw, adamw8bit, muon"),
        ("{name: muon, states: int8}", "states", "adamw"),
        ("{name: adamw, momentum: 0.9}", "momentum", "muon"),
        ("{name: adamw8bit, nesterov: true}", "nesterov", "muon"),
    ],
)
def test_a_setting_of_another_optimizer_is_refused(settings, key, having):
    with pytest.raises(RunFileError) as error:
        tiny_run(f"optimizer={settings}")
    assert f"optimizer.{key}" in str(error.value)
    assert having in str(error.value)


def test_a_missing_package_names_its_command(monkeypatch):
    monkeypatch.setattr(optimizer_updates, "find_spec", lambda name: None)
    for name, traits in OPTIMIZERS.items():
        settings = tiny_run(f"optimizer={{name: {name}}}").optimizer
        if traits.package is None:
            optimizer_updates.require(settings)
            continue
        with pytest.raises(MissingDependencyError) as error:
            optimizer_updates.require(settings)
        assert error.value.exit_code == 3
        assert "pip install" in error.value.hint


@pytest.mark.parametrize("plan", ["{data_shard: 2}", "{data_shard: 1, tensor: 2}"])
def test_states_in_blocks_are_not_sharded(plan):
    run = tiny_run("optimizer={name: adamw8bit}", f"parallel={plan}")
    assert {p.key for p in check(run)} == {"optimizer.name"}
    assert not check(tiny_run("optimizer={name: adamw8bit}", "parallel={data_shard: 2, sharding: none}"))


PLANS = {
    "fsdp": "{data_shard: 2, sharding: parameters}",
    "zero1": "{data_shard: 2}",
    "tensor": "{data_shard: 1, tensor: 2}",
    "pipeline": "{data_shard: 1, pipeline: 2}",
    "tensor, fsdp": "{data_shard: 2, tensor: 2, sharding: parameters}",
    "hsdp": "{data_shard: 2, data_replicate: 2, sharding: parameters}",
}
TERMS = 64
"""The longest sum of these runs: over the tokens of a step, the vocabulary, or a width."""
EXPERTS = "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "plan", "overrides"),
    [
        ("muon", "fsdp", ()),
        pytest.param("muon", "zero1", (), marks=pytest.mark.slow),
        pytest.param("muon", "tensor", (), marks=pytest.mark.slow),
        pytest.param("muon", "pipeline", (), marks=pytest.mark.slow),
        pytest.param("muon", "tensor, fsdp", (), marks=pytest.mark.slow),
        pytest.param("muon", "hsdp", (), marks=pytest.mark.slow),
        pytest.param("muon", "fsdp", (EXPERTS,), marks=pytest.mark.slow),
        pytest.param("muon", "tensor, fsdp", (EXPERTS,), marks=pytest.mark.slow),
        pytest.param("lion", "tensor, fsdp", (), marks=pytest.mark.slow),
    ],
)
@pytest.mark.when_touched  # test_parallel.py shards; one process trains with each optimizer above
def test_a_plan_trains_as_one_process(train, tmp_path, name, plan, overrides):
    """In fp32, to the rounding of sums in another order. Lion's signs jump, and so do Muon's updates in bf16."""
    same = ("precision=fp32", "train.checkpoint=null", "optimizer.epsilon=1.0e-4", *overrides)
    same = tuple(s for s in same if "epsilon" not in s or name != "lion")
    same = (*same, f"weights={tmp_path / 'begin'}")
    run = runfile.loads(TEXT.replace("NAME", name), overrides=overrides)
    begin = build_model(run.model, device="cpu")
    init_weights(begin, seed=run.train.seed)

    def trained(*more):
        for folder in ("out", "begin"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        save_weights(begin, tmp_path / "begin", dtype=torch.float32)
        train(name, *same, *more)
        return {"losses": torch.tensor(losses(tmp_path), dtype=torch.float64)}

    found = trained(f"parallel={PLANS[plan]}")
    assert_equals(trained, found, weights=begin.parameters(), terms=TERMS, jumps=True)
    assert found["losses"][-1] < found["losses"][0] - 0.01
