"""Events of a training, warm-up steps that leave no trace, and evaluations at exact samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import ObservedEngine, TrainOptions, find_engine
from meshwright.engines.native import engine
from meshwright.engines.observer import TrainingObserver
from meshwright.errors import InputError
from meshwright.records.training import Ending
from meshwright.specs.run import Run

MUON = "optimizer={name: muon, learning_rate: 1.0e-2}"
NARROW = "optimizer={states: int8, learning_rate: 1.0e-2}"
LORA = ("task=lora", "lora={rank: 2, dropout: 0.5}")
EXPERTS = "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1, router: sigmoid}"


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """A tiny run on a text, with overrides."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = f"data={{source: {folder / 'corpus.txt'}, tokenizer: bytes, sequence_length: 16}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        yield lambda *overrides: tiny_run(data, "model.vocab=260", "model.num_layers=2", *overrides)


@dataclass(frozen=True)
class Events(TrainingObserver):
    """Writes its events into a file, a line each."""

    path: Path

    def _note(self, *event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def initializing(self, *, rank: int) -> None:
        self._note("initializing", rank)

    def opening_data(self) -> None:
        self._note("opening_data")

    def training(self, *, num_samples: int) -> None:
        self._note("training", num_samples)

    def evaluating(self, *, num_samples: int) -> None:
        self._note("evaluating", num_samples)

    def evaluated(self, *, num_samples: int, loss: float) -> None:
        self._note("evaluated", num_samples, loss)

    def ended(self, *, num_samples: int, ending: Ending) -> None:
        self._note("ended", num_samples, ending)


def train(run: Run, folder: Path, *, observer: TrainingObserver | None = None, warm_up_steps: int = 0) -> Any:
    prepared = engine.prepare(run, options=TrainOptions(folder=folder, quiet=True))
    engine.launch(replace(prepared, observer=observer or TrainingObserver(), warm_up_steps=warm_up_steps))
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def observed(run: Run, folder: Path) -> list[list[Any]]:
    train(run, folder, observer=Events(folder.with_suffix(".events")))
    return [json.loads(line) for line in folder.with_suffix(".events").read_text().splitlines()]


def numbers(steps: list[dict[str, Any]]) -> list[Any]:
    """Results of each step, to the last bit."""
    return [[step.get(key) for key in ("loss", "gradient_norm", "validation_loss")] for step in steps]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="adamw"),
        pytest.param((*LORA, "precision=bf16"), id="lora with dropout in bf16", marks=pytest.mark.when_touched),
        pytest.param((NARROW, "precision=bf16"), id="states in 8 bits", marks=pytest.mark.when_touched),
        pytest.param((MUON,), id="muon", marks=pytest.mark.slow),
        pytest.param((EXPERTS, "train.balance_bias_rate=0.1"), id="experts", marks=pytest.mark.slow),
        pytest.param(("parallel={data_shard: 2, sharding: parameters}",), id="fsdp", marks=pytest.mark.slow),
        pytest.param(("parallel={data_shard: 1, pipeline: 2}",), id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_warm_up_steps_leave_no_trace(text_run, overrides, tmp_path, without_measuring, warm_ranks):
    run = text_run("train.evaluate={every_steps: 2, num_batches: 1}", *overrides)
    plain, warm = (numbers(train(run, tmp_path / str(n), warm_up_steps=n)) for n in (0, 2))
    assert plain == warm
    assert plain[0] != plain[1]


def test_events_come_in_order_with_exact_samples(text_run, tmp_path, without_measuring):
    run = text_run("train={steps: 7, evaluate: {every_steps: 2, num_batches: 1, skip_first: 1}}")
    events = [event[:2] for event in observed(run, tmp_path / "out")]
    assert events == [
        ["initializing", 0], ["opening_data"],
        ["training", 0],
        ["evaluating", 32], ["evaluated", 32], ["training", 32],
        ["evaluating", 48], ["evaluated", 48], ["training", 48],
        ["evaluating", 56], ["evaluated", 56],
        ["ended", 56],
    ]  # fmt: skip


def test_a_training_that_reaches_its_target_says_so(text_run, tmp_path, without_measuring):
    run = text_run("train={steps: 7, evaluate: {every_steps: 2, num_batches: 1, target_loss: 100}}")
    assert observed(run, tmp_path / "out")[-2:] == [
        ["evaluated", 16, pytest.approx(4.2, abs=1.0)],
        ["ended", 16, Ending.REACHED],
    ]


def test_no_data_is_opened_before_the_event(tmp_path, monkeypatch, without_measuring):
    """The audit hook of Python sees every file that is opened, memory-mapped ones too."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    data, opened, is_watching = tmp_path / "data", [], [True]
    data.mkdir()
    (data / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching[0] and event == "open" and str(data) in str(arguments[0]):
            opened.append(str(arguments[0]))

    before: list[int] = []

    class Watch(TrainingObserver):
        def opening_data(self) -> None:
            before.append(len(opened))

    sys.addaudithook(hook)
    run = tiny_run(f"data={{source: {data}, tokenizer: bytes, sequence_length: 16}}", "model.vocab=260")
    train(run, tmp_path / "out", observer=Watch(), warm_up_steps=1)
    is_watching[0] = False
    assert before == [0]
    assert opened


@pytest.mark.when_touched  # test_validation.py counts labels of any batch
def test_an_evaluation_of_a_number_of_sequences_is_the_same_for_any_batch(text_run, tmp_path, without_measuring):
    """The fourth sequence would count with num_batches."""
    sizes = (2, 3, 8)
    losses = [
        numbers(
            train(
                text_run(
                    f"batch.global_sequences={size}", "optimizer.learning_rate=1e-12",
                    "optimizer.weight_decay=0", "train={steps: 1, evaluate: {num_sequences: 3}}",
                ),
                tmp_path / str(size),
            )
        )[0][2]
        for size in sizes
    ]  # fmt: skip
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_number_of_sequences_and_of_batches_exclude_each_other():
    with pytest.raises(InputError, match="num_sequences"):
        tiny_run("train.evaluate={num_sequences: 3, num_batches: 2}")


def test_joined_documents_have_a_label_everywhere(tmp_path, monkeypatch):
    from meshwright.training.data import open_data

    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    for joined in (False, True):
        data = f"source: {tmp_path}/*.txt, tokenizer: bytes, joined_documents: {str(joined).lower()}"
        data = f"data={{{data}, sequence_length: 64}}"
        corpus = open_data(tiny_run(data, "model.vocab=260", "batch.global_sequences=2"))
        sample = corpus.train.sample(0)
        assert bool((sample.labels_T < 0).any()) is not joined
        assert bool(sample.documents_T.any()) is not joined
        assert (corpus.usage["training"]["label_ratio"] == 1) is joined
        if joined:
            assert sample.positions_T.tolist() == list(range(64))


def test_which_engines_report_their_events():
    found = {name: find_engine(name) for name in ("native", "torchtitan", "megatron", "maxtext", "trl")}
    observed = {name: engine for name, engine in found.items() if isinstance(engine, ObservedEngine)}
    assert {name: engine.takes_warm_up for name, engine in observed.items()} == {
        "native": True, "torchtitan": False, "megatron": False,
    }  # fmt: skip
