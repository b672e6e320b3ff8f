"""A training on a mixture: losses by source, progress in the record, resuming, and what `--resume` refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import TrainOptions
from meshwright.engines.megatron.megatron_lm.arguments import token_files
from meshwright.engines.native import engine
from meshwright.errors import InputError
from meshwright.specs.run import Checkpoint, Run
from meshwright.training.data import open_data
from meshwright.training.data.mixture import Mixture

pytestmark = pytest.mark.usefixtures("without_measuring")


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "web.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    answers = [{"prompt": "ask", "completion": "c" * (1 + n % 9)} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in answers))
    return tiny_run(
        f"data={{source: {{web: {{path: {tmp_path / 'web.txt'}, weight: 3}}, chat: {tmp_path / 'chat.jsonl'}}}, "
        "tokenizer: bytes, sequence_length: 16}",
        "model.vocab=260", "model.num_layers=1", "optimizer.schedule=constant",
        "train={steps: 4, evaluate: {every_steps: 4, best_by: chat}}",
    )  # fmt: skip


def train(run: Run, folder: Path, **options: Any) -> Any:
    run = replace(run, train=replace(run.train, checkpoint=Checkpoint(folder=str(folder / "saved"), every_steps=2)))
    return engine.train(run, options=TrainOptions(folder=folder, quiet=True, **options))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.when_touched  # test_resume.py resumes; data/test_mixture.py draws samples
def test_a_mixture_trains_and_resumes_as_if_nothing_had_been(mixed: Run, tmp_path: Path) -> None:
    record = train(mixed, tmp_path / "whole")
    s = record.statistics
    assert s["validation_losses"].keys() == {"web", "chat", "mean"}
    assert s["validation_loss"] == s["validation_losses"]["chat"]
    assert s["data_usage"]["sources"].keys() == {"web", "chat"}
    assert {name: (p["share"], p["num_samples"]) for name, p in s["data_progress"].items()} == {
        "chat": (0.25, 8), "web": (0.75, 24),
    }  # fmt: skip
    assert all(p["num_epochs"] > 0 for p in s["data_progress"].values())

    train(replace(mixed, train=replace(mixed.train, steps=2)), tmp_path / "parts")
    again = train(mixed, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert again.statistics["data_progress"] == s["data_progress"]


@pytest.mark.parametrize("change", ["weight", "name", "fewer"])
def test_another_mixture_is_another_run(mixed: Run, tmp_path: Path, change: str) -> None:
    train(replace(mixed, train=replace(mixed.train, steps=2, evaluate=None)), tmp_path / "out")
    sources = dict(mixed.data.sources)
    if change == "weight":
        sources["web"] = replace(sources["web"], weight=2.0)
    else:
        web = sources.pop("web")
        sources |= {"other": web} if change == "name" else {}
    other = replace(mixed, data=replace(mixed.data, source=sources), train=replace(mixed.train, evaluate=None))
    with pytest.raises(InputError, match=r"another run.*data\.source"):
        train(other, tmp_path / "out", resume=True)


def test_a_source_smaller_than_a_batch_is_repeated_and_bpe_reads_all(mixed: Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": "zyx"}))
    run = replace(mixed, data=replace(mixed.data, tokenizer="bpe:260"), train=replace(mixed.train, evaluate=None))
    corpus = open_data(run)
    assert isinstance(corpus.train, Mixture)
    assert corpus.train.sources["chat"].num_samples == 1
    assert corpus.train.progress(32)["chat"].num_epochs == 8
    (chat, _) = corpus.planned_epochs(num_steps=run.num_steps, num_sequences=32)
    assert chat.startswith("training data chat: 25.0 % of the samples, 1 an epoch, 8.00 epochs")


def test_megatron_blends_token_files() -> None:
    assert token_files(tiny_run("data.source={a: {path: x/a.bin, weight: 3}, b: b.idx}")) == "3 x/a 1 b"
    assert token_files(tiny_run("data.source={a: x/a.bin, b: b.txt}")) is None
    assert token_files(tiny_run("data.source=x/a.bin")) == "x/a"
