"""Lengths of the data of a run, as `train --dry-run` shows them, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.training.data import open_data
from meshwright.training.data.usage import DataUsage


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def counted(records: dict[str, list[dict[str, Any]]], *overrides: str) -> dict[str, DataUsage]:
        for name, of_source in records.items():
            Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in of_source))
        sources = ", ".join(f"{name}: {name}.jsonl" for name in records)
        data = f"data={{source: {{{sources}}}, tokenizer: bytes, sequence_length: 16}}"
        return open_data(tiny_run(data, "batch.global_sequences=1", "model.vocab=260", *overrides)).usages

    return counted


def test_prompts_are_counted_by_source(lengths: Any) -> None:
    answers = [{"prompt": "ask ", "completion": "x" * n} for n in (3, 1, 30, 6)]
    found = lengths({"a": answers, "b": [{"text": "hello " * 4}]})
    assert found.keys() == {"training data a", "training data b"}
    usage = found["training data a"]
    a, b = usage.lengths, found["training data b"].lengths
    assert a is not None
    assert b is not None
    # 4 bytes of the prompt, the answer, the end; of 35 tokens a sample and its last label hold 17
    assert (a.num_examples, a.tokens.total) == (4, 8 + 6 + 35 + 11)
    assert a.tokens.percentiles == {1: 6, 10: 6, 50: 8, 90: 35, 99: 35}
    assert a.tokens.histogram == (
        (6, 7, 1), (8, 11, 2), (12, 15, 0), (16, 22, 0), (23, 31, 0), (32, 45, 1),
    )  # fmt: skip
    assert a.labels.histogram == ((2, 2, 1), (3, 3, 0), (4, 5, 1), (6, 7, 1), (8, 11, 0), (12, 15, 1))
    assert a.labels.total == 4 + 2 + 13 + 7 == pytest.approx(usage.label_ratio * 48)
    assert (a.longest, a.shortest) == (3, 2)
    assert (usage.num_cut, usage.num_samples) == (1, 3)
    assert usage.padding_ratio == pytest.approx((2 + 5) / 48)  # 8 + 6 share a sample, 11 has one of its own
    assert (b.num_examples, b.tokens.total, b.labels.total) == (1, 25, 24)


@pytest.mark.parametrize(("joined", "labels"), [("false", 71), ("true", 74)])
def test_documents_of_a_stream_are_counted_whole(lengths: Any, joined: str, labels: int) -> None:
    texts = {"web": [{"text": "y" * n} for n in (20, 9, 40, 2)]}
    found = lengths(texts, f"data.joined_documents={joined}")["training data web"]
    assert found.num_samples == 4
    assert (found.lengths.tokens.total, found.lengths.labels.total) == (71 + 4, labels)
    assert (found.lengths.longest, found.lengths.shortest) == (3, 4)


def test_pairs_and_judged_answers_are_examples(lengths: Any) -> None:
    pairs = [{"prompt": "p", "chosen": "c" * n, "rejected": "r"} for n in (1, 5, 2)]
    found = lengths({"pairs": pairs}, "train.preference=dpo")["training data pairs"].lengths
    assert (found.num_examples, found.tokens.total, found.longest) == (3, 3 * 6 + 5, 2)
    judged = [{"prompt": "p", "completion": "c" * n, "label": n > 2} for n in (1, 4, 2)]
    found = lengths({"judged": judged}, "train.preference=kto")["training data judged"].lengths
    assert (found.num_examples, found.tokens.total, found.longest) == (3, 3 * 2 + 7, 2)
    assert found.labels.total == 3 + 7  # and an end each


def test_numbers_are_those_of_the_source_where_documents_are_held_out(lengths: Any) -> None:
    answers = [{"prompt": "", "completion": "x" * (n + 1)} for n in range(14)]
    found = [usage.lengths for usage in lengths({"a": answers}, "train.evaluate={}").values()]
    assert sum(part.num_examples for part in found) == 14
    for part in found:  # number n has n + 1 tokens
        assert sum(part.tokens.percentiles[p] for p in (1, 99)) == part.shortest + part.longest + 2
