"""Trainings with MaxText on this CPU, held against the native engine step by step.

Same weights (Hugging Face safetensors), same batches in the same order, fp32: losses and gradient norms agree to the
last digits that sums in another order leave. Devices are virtual ones of one process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("the native engine needs PyTorch", allow_module_level=True)

import torch

from meshwright import runfile
from meshwright.engines.native.models import build_model, init_weights, materialize
from meshwright.engines.native.weights import save_weights

TOLERANCE = 3e-6  # relative; docs/guides/maxtext.md has what was measured
DENSE = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
weights: start
data: {source: notes.txt, tokenizer: bytes, sequence_length: 64}
batch: {global_sequences: 8, micro: 2}
optimizer: {learning_rate: 2.0e-3, warmup_steps: 4, schedule: cosine}
precision: fp32
cluster: here
engine: maxtext
parallel: {data_shard: 1, sharding: none, recompute: full}
train: {steps: 20}
"""
MIXTURE = DENSE.replace(
    "family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128",
    "family: Qwen3MoeForCausalLM, hidden: 64, num_layers: 2, vocab: 258",
).replace(
    "num_kv_heads: 2}}",
    "num_kv_heads: 2, head_dim: 16, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}",
)


class Toy:
    """A run file, its text and the weights that it starts from, in a folder."""

    def __init__(self, folder: Path, text: str, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        folder.mkdir()
        (folder / "run.yaml").write_text(text)
        notes = [
            f"{i} times {j} is {i * j}. " + ("\n\n" if j == 12 else "") for i in range(60) for j in range(13)
        ]
        (folder / "notes.txt").write_text("".join(notes))
        self.model = runfile.loads(text).model
        model = build_model(self.model)
        materialize(model, device=torch.device("cpu"))
        init_weights(model, seed=1)
        save_weights(model, folder / "start", dtype=torch.float32)
        self.native = self.train("native", "--set=engine=native")

    def meshwright(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "meshwright", *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=500,
        )  # fmt: skip

    def run(self, out: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`meshwright train run.yaml`."""
        return self.meshwright("train", "run.yaml", "--json", f"--out={out}", *arguments)

    def train(self, out: str, *arguments: str) -> list[dict[str, float]]:
        """Train to the end; the lines of the step log."""
        done = self.run(out, *arguments)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (self.folder / out / "steps.jsonl").read_text().splitlines()]

    def record(self, out: str) -> dict[str, dict[str, object]]:
        return json.loads((self.folder / out / "record.json").read_text())


@pytest.fixture(scope="module")
def dense(maxtext, tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("maxtext") / "dense", DENSE, maxtext)


@pytest.fixture(scope="module")
def mixture(maxtext, tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("maxtext") / "mixture", MIXTURE, maxtext)


def assert_equal(taken: list[dict[str, float]], native: list[dict[str, float]]) -> None:
    assert [line["step"] for line in taken] == [line["step"] for line in native]
    for mine, theirs in zip(taken, native, strict=True):
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=3e-7)  # it is fp32 there
        for key in ("loss", "gradient_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), (mine["step"], key)


def test_losses_are_those_of_the_native_engine(dense):
    taken = dense.train("one")
    assert_equal(taken, dense.native)
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
    record, native = dense.record("one"), dense.record("native")
    assert record["ending"] == "done"
    assert record["software"]["maxtext"] == "0.2.5"
    assert record["statistics"].keys() == native["statistics"].keys()
    for key in ("model_flops_per_token", "parameters", "tokens", "num_devices"):  # one FLOP rule for both
        assert record["statistics"][key] == native["statistics"][key]
    assert record["statistics"]["peak_memory_bytes"] > 100 << 20
    assert (dense.folder / "one" / "report.html").is_file()


def plan(words: str) -> str:
    return f"--set=parallel={{{words}, recompute: full}}"


def test_two_devices_fully_sharded(dense):
    taken = dense.train("sharded", plan("data_shard: 2, sharding: parameters"))
    assert_equal(taken, dense.native)
    assert dense.record("sharded")["statistics"]["num_devices"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor", "data_shard: 1, tensor: 2, sharding: none"),
        ("pipeline", "data_shard: 1, pipeline: 2, schedule: gpipe, sharding: none"),
        ("context", "data_shard: 1, context: 2, sharding: parameters"),
        ("four", "data_shard: 2, tensor: 2, sharding: parameters"),
    ],
)
def test_other_axes(dense, name, words):
    assert_equal(dense.train(name, plan(words)), dense.native)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one", "data_shard: 1, sharding: none"),
        ("experts", "data_shard: 2, expert: 2, sharding: parameters"),
    ],
)
def test_a_mixture_of_experts(mixture, name, words):
    assert_equal(mixture.train(name, plan(words)), mixture.native)


@pytest.mark.slow
def test_resumed_on_two_devices_and_continued_by_the_native_engine(dense):
    """Twelve steps of one device, the other eight of two; the weights then go back into the native engine."""
    saves = "--set=train.checkpoint={folder: saved, every_steps: 6}"
    assert_equal(dense.train("resumed", saves), dense.native)
    checkpoints = dense.folder / "saved" / "maxtext" / "checkpoints"
    assert sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()) == [
        6,
        12,
        18,
        20,
    ]
    again = dense.run("resumed", saves)
    assert again.returncode == 2
    assert "already holds checkpoints" in again.stderr

    exported = dense.meshwright(
        "checkpoint", "to-hf", "resumed/meshwright_run.yaml", "twelve", "--step=12", "--dtype=fp32"
    )
    assert exported.returncode == 0, exported.stderr
    begun = [
        dense.train(
            f"begun-{engine}", f"--set=engine={engine}", "--set=weights=twelve", "--set=train.steps=4"
        )
        for engine in ("maxtext", "native")
    ]
    assert begun[0][0]["loss"] == pytest.approx(begun[1][0]["loss"], rel=TOLERANCE)
    assert begun[0][0]["loss"] < dense.native[0]["loss"] - 0.5

    for late in ("18", "20"):
        shutil.rmtree(checkpoints / late)
    rest = dense.train("resumed", saves, "--resume", plan("data_shard: 2, sharding: parameters"))
    assert_equal(rest, dense.native)


@pytest.mark.slow
def test_data_that_maxtext_cannot_be_told_is_refused(dense):
    turns = [
        {"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(500)
    ]
    (dense.folder / "chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    done = dense.run("refused", "--set=data.source=chat.jsonl")
    assert done.returncode == 1
    assert "MaxText's input pipeline trains on every token but the last of a document" in done.stderr


@pytest.mark.slow
def test_weights_are_drawn_where_none_are_given(dense):
    taken = dense.train("drawn", "--set=weights=null", "--set=precision=bf16")
    assert taken[0]["loss"] == pytest.approx(dense.native[0]["loss"], rel=0.01)  # of the same distributions
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
