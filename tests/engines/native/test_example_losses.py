"""Losses of single examples and of turns: each is the loss of a validation on it alone, on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.example_losses import ExampleLosses

pytestmark = pytest.mark.usefixtures("without_measuring")

ANSWERS = {"web": ("abc", "zzzzzzzz", "the quick"), "code": ("x = 1", "def f(y): pass")}
TALKS = (("hi", "hello"), ("what", "that", "why", "so"))  # by turns: user, assistant, ...


def says(talk: tuple[str, ...], trained: int | None = None) -> dict[str, Any]:
    """A conversation; `trained`: only this answer is trained on."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[i % 2], "content": text, "weight": int(trained in (None, i // 2))}
            if i % 2
            else {"role": roles[0], "content": text}
            for i, text in enumerate(talk)
        ]
    }


@pytest.fixture
def validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)

    def statistics(validation: dict[str, list[dict[str, Any]]], *overrides: str, source: str = "corpus.txt") -> Any:
        """The statistics of a training of one step that changes next to nothing."""
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, records in validation.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        places = ", ".join(f"{name}: {folder / name}.jsonl" for name in validation)
        run = tiny_run(
            f"data={{source: {tmp_path / source}, tokenizer: bytes, sequence_length: 192, validation: {{{places}}}}}",
            "model.vocab=260", "model.num_layers=2", "optimizer.learning_rate=1e-9", "optimizer.weight_decay=0",
            "train={steps: 1, evaluate: {num_batches: 4}}", *overrides,
        )  # fmt: skip
        return engine.train(run, options=TrainOptions(folder=folder / "out", quiet=True)).statistics

    return statistics


def test_the_worst_examples_have_the_losses_that_they_have_alone(validated: Any) -> None:
    records = {name: [{"prompt": "ask ", "completion": a} for a in of_source] for name, of_source in ANSWERS.items()}
    alone = validated({f"{name}{i}": [r] for name, of_source in records.items() for i, r in enumerate(of_source, 1)})
    found = validated(records)
    losses = {f"{row['source']}{row['number']}": row["loss"] for row in found["worst_examples"]}
    expected = {name: loss for name, loss in alone["validation_losses"].items() if name != "mean"}
    assert losses == pytest.approx(expected, rel=1e-5)
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    labels = {f"{row['source']}{row['number']}": row["labels"] for row in found["worst_examples"]}
    assert labels == {f"{n}{i}": len(a) + 1 for n, of in ANSWERS.items() for i, a in enumerate(of, 1)}  # and the end
    assert found["validation_turns"] == []


def test_the_loss_of_a_turn_is_that_of_its_answers(validated: Any) -> None:
    found = validated({"chat": [says(talk) for talk in TALKS]})
    first = validated({"chat": [says(talk, trained=0) for talk in TALKS]})
    second = validated({"chat": [says(TALKS[1], trained=1)]})
    losses = [row["loss"] for row in found["validation_turns"]]
    assert losses == pytest.approx([first["validation_loss"], second["validation_loss"]], rel=1e-5)
    mark = len("<|im_end|>")
    assert [row["turn"] for row in found["validation_turns"]] == [1, 2]
    assert [row["labels"] for row in found["validation_turns"]] == [9 + 2 * mark, 2 + mark]
    labels = sum(row["labels"] for row in found["validation_turns"])
    mean = sum(row["loss"] * row["labels"] for row in found["validation_turns"]) / labels
    assert mean == pytest.approx(found["validation_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "parallel",
    [
        "parallel={data_shard: 2}",
        "parallel={context: 2}",
        "parallel={tensor: 2}",
        "parallel={pipeline: 2, schedule: 1f1b}",
    ],
)
def test_several_processes_find_the_same_examples(validated: Any, parallel: str) -> None:
    data = {"chat": [says(talk) for talk in TALKS], "web": [{"prompt": "q", "completion": a} for a in ANSWERS["web"]]}
    one, several = validated(data), validated(data, parallel, "batch.micro=4")
    for key in ("worst_examples", "validation_turns"):
        assert [row.keys() for row in several[key]] == [row.keys() for row in one[key]]
        for row, other in zip(several[key], one[key], strict=True):
            assert row == {**other, "loss": pytest.approx(other["loss"], rel=1e-5)}


def test_the_worst_pairs_have_the_loss_of_pairs(validated: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": "p", "chosen": c, "rejected": r} for c, r in (("good", "bad"), ("yes", "no"), ("a", "b"))]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 4))
    both = ("train.preference={loss: simpo}",)
    found = validated({"pairs": pairs}, *both, source="pairs.jsonl")
    alone = validated({f"pair{i}": [p] for i, p in enumerate(pairs, 1)}, *both, source="pairs.jsonl")
    losses = {f"pair{row['number']}": row["loss"] for row in found["worst_examples"]}
    assert losses == pytest.approx({n: loss for n, loss in alone["validation_losses"].items() if n != "mean"}, rel=1e-5)
    assert [row["labels"] for row in found["worst_examples"]] == [1] * 3
    assert found["validation_turns"] == []


def test_parts_of_a_document_in_several_samples_are_one_example() -> None:
    examples = ExampleLosses()
    for losses in ([1.0, 2.0, 9.0], [3.0, 0.0, 4.0]):
        examples.add("web", torch.tensor([[[7, 7, 0]], [[1, 1, 0]]]), torch.tensor([losses]))
    assert examples.worst() == [{"source": "web", "number": 7, "loss": 1.5, "labels": 4}]
