"""Lengths of the data of a run, as `train --dry-run` shows them, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.training.data.lengths import DataLengths, data_lengths


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def counted(records: dict[str, list[dict[str, Any]]], *overrides: str) -> dict[str, dict[str, DataLengths]]:
        for name, of_source in records.items():
            Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in of_source))
        sources = ", ".join(f"{name}: {name}.jsonl" for name in records)
        data = f"data={{source: {{{sources}}}, tokenizer: bytes, sequence_length: 16}}"
        return data_lengths(tiny_run(data, "batch.global_sequences=1", "model.vocab=260", *overrides))

    return counted


def test_prompts_are_counted_by_source(lengths: Any) -> None:
    answers = [{"prompt": "ask ", "completion": "x" * n} for n in (3, 1, 30, 6)]
    found = lengths({"a": answers, "b": [{"text": "hello " * 4}]})
    a, b = found["training"]["a"], found["training"]["b"]
    assert found["validation"] == {}
    # 4 bytes of the prompt, the answer, the end; of 35 tokens a sample and its last label hold 17
    assert (a.kind, a.num_examples, a.tokens.total) == ("documents", 4, 8 + 6 + 35 + 11)
    assert a.tokens.percentiles == {1: 6, 10: 6, 50: 8, 90: 35, 99: 35}
    assert a.tokens.histogram == (
        (6, 7, 1), (8, 11, 2), (12, 15, 0), (16, 22, 0), (23, 31, 0), (32, 45, 1),
    )  # fmt: skip
    assert a.labels is not None
    assert a.labels.histogram == ((2, 2, 1), (3, 3, 0), (4, 5, 1), (6, 7, 1), (8, 11, 0), (12, 15, 1))
    assert a.labels.total == a.num_labels == 4 + 2 + 13 + 7
    assert (a.longest.number, a.longest.num_tokens, a.shortest.number, a.shortest.num_tokens) == (3, 35, 2, 6)
    assert (a.usage.num_cut, a.usage.num_samples) == (1, 3)
    assert a.usage.padding_ratio == pytest.approx((2 + 5) / 48)  # 8 + 6 share a sample, 11 has one of its own
    assert (b.kind, b.num_examples, b.tokens.total, b.num_labels) == (
        "documents",
        1,
        25,
        16,
    )  # the rest of the text fills no sample


def test_a_stream_has_documents_and_no_labels_of_their_own(lengths: Any) -> None:
    found = lengths({"web": [{"text": "y" * n} for n in (20, 9, 40, 2)]})["training"]["web"]
    assert (found.tokens.total, found.labels, found.usage.num_samples) == (71 + 4, None, 4)
    assert found.num_labels == 4 * 16 - 2  # two documents end within the 64 positions that have a label
    assert (found.longest.number, found.shortest.number) == (3, 4)


def test_pairs_and_conversations_are_examples(lengths: Any) -> None:
    pairs = [{"prompt": "p", "chosen": "c" * n, "rejected": "r"} for n in (1, 5, 2)]
    found = lengths({"pairs": pairs}, "train.preference=dpo")["training"]["pairs"]
    assert (found.kind, found.num_examples) == ("pairs", 3)
    assert (found.tokens.total, found.longest.number, found.longest.num_tokens) == (3 * 6 + 5, 2, 10)
    judged = [{"prompt": "p", "completion": "c" * n, "label": n > 2} for n in (1, 4, 2)]
    found = lengths({"judged": judged}, "train.preference=kto")["training"]["judged"]
    assert (found.kind, found.num_examples, found.tokens.total) == ("judged answers", 3, 3 * 2 + 7)
    assert found.labels is not None
    assert found.labels.total == 3 + 7  # and an end each
    says = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    found = lengths({"chat": [{"messages": says}] * 2}, "data.sequence_length=128")["training"]["chat"]
    assert (found.kind, found.num_examples) == ("conversations", 2)


def test_numbers_are_those_of_the_source_where_documents_are_held_out(lengths: Any) -> None:
    answers = [{"prompt": "", "completion": "x" * (n + 1)} for n in range(14)]
    found = lengths({"a": answers}, "train.evaluate={}")
    parts = [found["training"]["a"], found["validation"]["validation"]]
    assert all(e.num_tokens == e.number + 1 for part in parts for e in (part.longest, part.shortest))
    assert sum(part.num_examples for part in parts) == 14
