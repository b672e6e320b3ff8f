"""A note says where the validation data is training data."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.training.data.corpus import open_data
from meshwright.training.data.megatron import write_indexed


@pytest.mark.parametrize(
    ("validation", "named"),
    [
        ("a.txt", "validation data is"),
        ("copy.txt", "validation data is"),
        ("b.txt", None),
        ("{new: b.txt, old: copy.txt}", "validation data old is"),
    ],
)
@pytest.mark.parametrize("source", ["a.txt", "{first: {path: a.txt, weight: 1}, second: {path: c.txt, weight: 1}}"])
def test_validation_on_training_data_is_noted(tmp_path, monkeypatch, source, validation, named):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "one text ", "copy": "one text ", "b": "another text ", "c": "third text "}.items():
        (tmp_path / f"{name}.txt").write_text(text * 200)
    run = tiny_run(f"data={{source: {source}, validation: {validation}, tokenizer: bytes, sequence_length: 16}}",
                   "model.vocab=257", "train.evaluate={}")  # fmt: skip
    found = [note for note in open_data(run, cache=tmp_path / "cache").notes if "is training data too" in note]
    assert [note.partition(" training")[0] for note in found] == ([] if named is None else [named])


def test_token_files_are_compared_by_their_place(tmp_path):
    for name in ("a", "b"):
        write_indexed(tmp_path / name, [np.arange(200) % 64], dtype=np.uint16)
    data = "data={{source: {0}/a.bin, validation: {0}/{1}.bin, sequence_length: 16}}"
    notes = [open_data(tiny_run(data.format(tmp_path, name), "train.evaluate={}")).notes for name in ("a", "b")]
    assert ["validation data is training data too" in " ".join(found) for found in notes] == [True, False]
