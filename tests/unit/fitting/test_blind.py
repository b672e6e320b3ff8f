"""Predictions that are made before a source is read."""

from __future__ import annotations

import csv
from dataclasses import fields

import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.predict import predict
from meshwright.accuracy.shipped import BlindPrediction, blind_predictions, blind_predictions_path, measured_runs_path
from meshwright.fitting.blind import main, predict_blind


def test_each_line_is_a_row_that_ships():
    sources = {run.id: run.source_key for run in shipped_runs()}
    assert {name: one.source_key for name, one in blind_predictions().items()}.items() <= sources.items()


def test_the_file_has_the_columns_that_the_command_writes():
    with blind_predictions_path().open(encoding="utf-8", newline="") as lines:
        assert next(csv.reader(lines)) == [f.name for f in fields(BlindPrediction)]


def test_rows_with_conditions_are_predicted(read_many):
    runs = read_many({"id": "one"}, {"id": "silent", "seq_len": ""})
    (one,) = predict_blind(runs, commit="abc")
    expected = predict(runs[:1])
    assert (one.id, one.source_key, one.commit, one.fits) == ("one", runs[0].source_key, "abc", expected.fits[0])
    assert one.predicted == pytest.approx(expected.tokens_per_s_per_device[0], abs=0.05)
    assert one.low < one.predicted < one.high
    assert not list(predict_blind(runs[1:], commit="abc"))


def test_the_command_writes_lines_to_add(monkeypatch, capsys, tmp_path):
    lines = measured_runs_path().read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "few.csv"
    path.write_text("".join([lines[0], *lines[1:40]]), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["blind", str(path), "--commit", "abc"])
    main()
    names = [f.name for f in fields(BlindPrediction)]
    written = list(csv.DictReader(capsys.readouterr().out.splitlines(), fieldnames=names))
    assert len(written) > 20
    assert {line["commit"] for line in written} == {"abc"}
    assert all(float(line["predicted"]) > 0 for line in written)
