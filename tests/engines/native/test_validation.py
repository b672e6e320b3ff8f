"""Validation: every label of every source counts once, on any number of processes and in batches of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import TrainOptions, find_engine
from meshwright.engines.native import engine
from meshwright.errors import InputError
from meshwright.records.training import Ending, Record
from meshwright.training.data import IGNORED_LABEL, Batches
from meshwright.training.data.packing import SyntheticSamples

pytestmark = pytest.mark.usefixtures("without_measuring")

LENGTHS = {"web": (3, 20, 9), "code": (12, 1)}  # of answers: each record is a sample of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    for name, lengths in LENGTHS.items():
        records = [{"prompt": "ask " * 3, "completion": "abcdefghijklmnopqrstuvwxyz"[:n]} for n in lengths]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def evaluated(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))

    def train(validation: str, *overrides: str, evaluate: str = "num_batches: 4") -> Record:
        """Train one step that changes next to nothing, so that losses can be compared."""
        run = tiny_run(
            f"data={{source: {folder / 'corpus.txt'}, tokenizer: bytes, sequence_length: 32, "
            f"validation: {validation}}}",
            "model.vocab=260", "model.num_layers=1", "optimizer.learning_rate=1e-9", "optimizer.weight_decay=0",
            f"train={{steps: 1, evaluate: {{{evaluate}}}}}", *overrides,
        )  # fmt: skip
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return engine.train(run, options=TrainOptions(folder=out, quiet=True))

    return train


@pytest.mark.when_touched  # test_each_source_is_shown_and_the_mean_is_that_of_all_labels counts labels of one process
def test_a_small_set_counts_every_label_once_in_any_batch_and_on_any_number_of_processes(
    evaluated: Any, folder: Path
) -> None:
    web = str(folder / "web.jsonl")
    losses = [
        evaluated(web, f"batch.global_sequences={batch}", *parallel).statistics["validation_loss"]
        for batch, parallel in (
            (8, ()),
            (1, ()),
            (2, ()),
            (8, ("parallel={data_shard: 2, sharding: none}", "batch.micro=2")),
            (8, ("parallel={data_shard: 1, context: 2}", "batch.micro=4")),
        )
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


def test_each_source_is_shown_and_the_mean_is_that_of_all_labels(evaluated: Any, folder: Path) -> None:
    alone = {name: evaluated(str(folder / f"{name}.jsonl")).statistics["validation_loss"] for name in LENGTHS}
    both = "{" + ", ".join(f"{name}: {folder / f'{name}.jsonl'}" for name in LENGTHS) + "}"
    record = evaluated(both)
    s = record.statistics
    num_labels = {name: sum(n + 1 for n in lengths) for name, lengths in LENGTHS.items()}  # and the end
    mean = sum(alone[n] * num_labels[n] for n in LENGTHS) / sum(num_labels.values())
    assert s["validation_losses"] == pytest.approx({**alone, "mean": mean}, rel=1e-6)
    assert s["validation_loss"] == s["validation_losses"]["mean"]
    assert {n: u["num_samples"] for n, u in s["data_usage"]["validation"].items()} == {"web": 3, "code": 2}
    by_code = evaluated(both, evaluate="best_by: code, target_loss: 100")
    assert by_code.statistics["validation_loss"] == pytest.approx(alone["code"], rel=1e-6)
    assert by_code.ending is Ending.REACHED


def test_a_text_shorter_than_a_sequence_is_one_sample(evaluated: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abcdefg")
    (tmp_path / "empty.txt").write_text("")
    s = evaluated(str(tmp_path / "short.txt")).statistics
    usage = s["data_usage"]["validation"]["validation"]
    assert (usage["num_samples"], usage["num_padded"]) == (1, 1)
    assert (usage["label_ratio"], usage["padding_ratio"]) == (7 / 32, 24 / 32)
    assert 3 < s["validation_loss"] < 8
    with pytest.raises(InputError, match="the data has no text"):
        evaluated(str(tmp_path / "empty.txt"))


def test_rows_after_the_last_sample_are_padding() -> None:
    samples = SyntheticSamples(vocab=9, sequence_length=4, num_samples=5)
    both = [
        Batches(samples=samples, global_batch=4, data_rank=rank, data_width=2, is_shuffled=False, is_once=True)
        for rank in (0, 1)
    ]
    assert both[0].num_to_the_end == 2
    assert [part.sample_numbers(1) for part in both] == [[4, -1], [-1, -1]]
    last = both[1].at(1)
    assert (last.labels_BT == IGNORED_LABEL).all()
    assert (last.documents_BT == -1).all()
    assert last.num_trained_tokens == 0


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "maxtext"])
def test_other_engines_refuse_several_sources(name: str) -> None:
    run = tiny_run("data.validation={a: x, b: y}", "train.evaluate={}", f"engine={name}")
    assert "data.validation" in {problem.key for problem in find_engine(name).check(run)}


def test_random_tokens_are_not_validated_on_text(tmp_path: Path) -> None:
    run = tiny_run("data.validation=x.txt", "train.evaluate={}")
    with pytest.raises(InputError, match="source is synthetic"):
        engine.train(run, options=TrainOptions(folder=tmp_path, quiet=True))
