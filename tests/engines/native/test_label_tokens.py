"""`batch.label_tokens`: steps of as many labels, read batch by batch, alike on all ranks and after a resume."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.rounding import assert_equals

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.step import Accumulation
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.plan import Plan
from meshwright.training import checkpoints
from meshwright.training.checkpoints.metadata import CheckpointReader
from meshwright.training.data import Corpus
from meshwright.training.data.packing import Sample
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

AIM = 200
TRAIN = "{{steps: {steps}, checkpoint: {{folder: saved, every_steps: 2}}}}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of 1 to 24 tokens behind prompts: samples differ in their labels."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = np.random.default_rng(1)
    rows = [{"prompt": "q" * 4, "completion": "a" * int(n)} for n in rng.integers(1, 25, size=300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sections(chats: Path) -> dict[str, str]:
    return {
        "model": "{name: tiny, hidden: 32, num_layers: 2, vocab: 512, ffn_hidden: 64, "
        "attention: {num_heads: 4, num_kv_heads: 2}}",
        "data": f"{{source: {chats}, tokenizer: bytes, sequence_length: 32}}",
        "batch": f"{{global_sequences: 4, micro: 2, label_tokens: {AIM}}}",
        "precision": "fp32",
        "optimizer": "{schedule: constant}",
        "train": TRAIN.format(steps=6),
    }


@pytest.fixture
def train(tiny_run, sections, tmp_path):
    """`train(name, *overrides)` in this process: the record and the lines of the step log."""

    def run(name: str, *overrides: str, **options: Any):
        loaded = runfile.loads(
            tiny_run(tmp_path, **sections).text,
            overrides=(f"train.checkpoint.folder={tmp_path / name / 'saved'}", *overrides),
        )
        record = engine.train(loaded, options=TrainOptions(folder=tmp_path / name, quiet=True, **options))
        lines = (tmp_path / name / "steps.jsonl").read_text().splitlines()
        return record, [json.loads(line) for line in lines]

    return run


def compared(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(e[k] for k in ("step", "batch", "batches", "labels", "tokens", "loss")) for e in entries]


def losses_in(entries: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in entries], dtype=torch.float64)


# --- the law of reading ---


class CountedSamples:
    """Sample i has `labels[i]` labels, 8 at most."""

    sequence_length = 8

    def __init__(self, labels: list[int]) -> None:
        self.labels = labels
        self.num_samples = len(labels)

    def sample(self, number: int) -> Sample:
        zeros = np.zeros(8, np.int64)
        labels = np.where(np.arange(8) < self.labels[number], 1, IGNORED_LABEL)
        return Sample(tokens_T=zeros, labels_T=labels, positions_T=np.arange(8), documents_T=zeros)


@given(labels=st.lists(st.integers(1, 8), min_size=1, max_size=12), size=st.integers(1, 4), aim=st.integers(1, 60))
def test_a_step_reads_until_its_labels_are_there_and_no_further(labels: list[int], size: int, aim: int) -> None:
    run = runfile.loads(
        "model: {name: t, hidden: 8, num_layers: 1, vocab: 8, ffn_hidden: 8, "
        "attention: {num_heads: 1, num_kv_heads: 1}}\n"
        f"data: {{sequence_length: 8, workers: 0}}\nbatch: {{global_sequences: {size}, label_tokens: {aim}}}\n"
        "cluster: here\nprecision: fp32\ntrain: {steps: 1}\n"
    )
    corpus = Corpus(train=CountedSamples(labels), validations={}, tokenizer=None, num_tokens=None)  # pyright: ignore[reportArgumentType]
    coordinates = MeshCoordinates(plan=Plan(micro_batch=1), device=torch.device("cpu"))
    loader = BatchLoader(run, coordinates=coordinates, corpus=corpus)
    first = 0
    for _ in range(4):
        found = loader.batch(first)
        each = [loader.batches.at(first + i).num_trained_tokens for i in range(found.counts.num_batches)]
        assert sum(each[:-1]) < aim <= sum(each) == found.counts.num_labels
        assert (found.tensors["labels_BT"] >= 0).sum() == sum(each)
        assert len(found.tensors["tokens_BT"]) == size * len(each)
        first = found.counts.last + 1


# --- trainings ---


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    held = CheckpointReader(path).read_metadata().state_dict_metadata
    into = {n: torch.empty(t.size) for n, t in held.items() if n.startswith("weights.")}
    checkpoints.load(checkpoints.SavedCheckpoint(step=1, path=path), into=into)
    return into


def test_a_step_equals_one_big_batch_of_the_same_labels(train) -> None:
    record, (step,) = train("parts", "train.steps=1")
    assert step["labels"] >= AIM
    assert step["batches"] > 2
    whole, (other,) = train(
        "whole", "train.steps=1", "batch.label_tokens=null", f"batch.global_sequences={4 * step['batches']}"
    )
    for key in ("loss", "gradient_norm", "tokens"):
        assert step[key] == other[key], key
    found, expected = (weights_in(Path(r.statistics["checkpoint"])) for r in (record, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.when_touched  # test_resume.py resumes; a step counts labels in one process above
def test_a_resumed_run_reads_on_where_it_was(train) -> None:
    whole, entries = train("whole")
    assert len({e["batches"] for e in entries}) > 1
    assert [e["batch"] for e in entries[1:]] == [e["batch"] + e["batches"] for e in entries[:-1]]
    assert entries[-1]["tokens"] == 4 * 32 * (entries[-1]["batch"] + entries[-1]["batches"])
    train("cut", "train.steps=3")
    again, cut = train("cut", resume=True)
    assert compared(cut) == compared(entries)
    for key in ("tokens", "data_progress"):
        assert again.statistics[key] == whole.statistics[key]
    sizes = whole.statistics["label_tokens"]
    assert (sizes["aim"], sizes["labels"]["n"]) == (AIM, 6)
    assert any("as in the data" in note and "batch.label_tokens" in note for note in whole.notes)


@pytest.mark.when_touched  # test_a_resumed_run_reads_on_where_it_was resumes by labels
def test_a_run_may_change_to_labels_and_back(train) -> None:
    """Tokens and places in the data stay true."""
    train("run", "batch.label_tokens=null", "train.steps=2")
    _, middle = train("run", "train.steps=4", resume=True)
    after = middle[-1]["batch"] + middle[-1]["batches"]
    assert middle[2]["batch"] == 2
    by_tokens = ("batch.label_tokens=null", "train.steps=null", "train.tokens=3_000")
    record, last = train("run", *by_tokens, resume=True)
    assert last[4]["batch"] == after
    steps = 4 + math.ceil((3_000 - middle[-1]["tokens"]) / 128)
    assert (record.statistics["steps"], last[-1]["tokens"]) == (steps, middle[-1]["tokens"] + 128 * (steps - 4))


@pytest.mark.parametrize("action", [pytest.param("skip", marks=pytest.mark.slow), "roll_back"])
@pytest.mark.when_touched  # test_fault_detector.py skips batches of a number of sequences
def test_a_faulty_step_skips_all_its_batches(train, monkeypatch, action: str) -> None:
    passes, calls = Accumulation.forward_backward, []

    def poisoned(self, batch, *, scale):
        calls.append(len(batch["tokens_BT"]) // 4)
        return passes(self, batch, scale=scale * (math.nan if len(calls) == 4 else 1.0))

    monkeypatch.setattr(Accumulation, "forward_backward", poisoned)
    record, entries = train("run", f"train.faults.not_finite={action}")
    (event,) = record.events
    first = sum(calls[:3] if action == "skip" else calls[:2])
    assert event["passed_over"] == [first, sum(calls[:4]) - 1]
    assert event["batch"] == sum(calls[:3])
    trained = [e["batch"] for e in entries]
    assert not {*trained} & {*range(first, sum(calls[:4]))}
    assert entries[-1]["tokens"] == 128 * sum(e["batches"] for e in entries)


@pytest.mark.when_touched  # test_a_step_equals_one_big_batch_of_the_same_labels counts in one process
@pytest.mark.distributed
def test_two_ranks_stop_at_the_same_batch_as_one_process(train, tiny_run, sections, tmp_path) -> None:
    sections |= {"weights": str(tmp_path / "begin"), "optimizer": "{schedule: constant, epsilon: 1.0e-4}"}
    begin = build_model(runfile.loads(tiny_run(tmp_path, **sections).text).model, device="cpu")
    init_weights(begin, seed=5)
    steps: list[list[dict[str, Any]]] = []

    def losses_of_one() -> dict[str, torch.Tensor]:
        shutil.rmtree(tmp_path / "begin", ignore_errors=True)
        save_weights(begin, tmp_path / "begin", dtype=torch.float32)
        steps.append(train(f"one-{len(steps)}")[1])
        return {"losses": losses_in(steps[-1])}

    losses_of_one()
    two = tiny_run(tmp_path / "two", **sections, parallel="{data_shard: 2, sharding: parameters}")
    two.train()
    assert [entry[:5] for entry in compared(two.steps())] == [entry[:5] for entry in compared(steps[0])]
    # the longest sum is over the vocabulary, or over the tokens of a step
    terms = max(512, *(128 * entry["batches"] for entry in steps[0]))
    found = {"losses": losses_in(two.steps())}
    assert_equals(losses_of_one, found, weights=begin.parameters(), terms=terms)
