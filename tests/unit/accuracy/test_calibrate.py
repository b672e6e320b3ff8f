"""`python -m meshwright.accuracy.calibrate` and what it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.accuracy import calibrate as module
from meshwright.accuracy.calibrate import COVERAGE, calibrate, main
from meshwright.accuracy.fit import fit
from meshwright.accuracy.left_out import left_out_errors
from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.catalog.calibration import from_document
from meshwright.cost.uncertainty import Z80

SOURCES = ("megatron_lm_llama_ex", "megatron_seqpar_paper")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped rows of two sources, as a file of their own."""
    path = tmp_path_factory.mktemp("runs") / "few.csv"
    with measured_runs_path().open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if row["source_key"] in SOURCES]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["calibrate", *map(str, arguments)])
    main()


def test_it_writes_a_calibration_that_says_what_it_was_made_from(monkeypatch, few, tmp_path, capsys):
    out = tmp_path / "step.json"
    run(monkeypatch, "--runs", few, "--out", out)
    document = json.loads(out.read_text())
    assert "from 11 rows of few.csv" in document["made"]
    assert document["rows"] == {"megatron_lm_llama_ex": 3, "megatron_seqpar_paper": 8}
    assert from_document(document).num_rows("framework", "megatron-lm-2021") == 8
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fitting 11 rows of 2 sources" in captured.err


def test_a_failure_leaves_the_old_file(monkeypatch, few, tmp_path):
    out = tmp_path / "step.json"
    out.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(module, "calibrate", fail)
    with pytest.raises(RuntimeError):
        run(monkeypatch, "--runs", few, "--out", out)
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    assert out.read_text() == "old"


def test_intervals_hold_as_many_left_out_rows_as_they_say(few):
    runs = [r for r in read_runs(few) if r.reason is None]
    scale = calibrate(runs, made="x").interval_scale
    error, sd = left_out_errors(runs, fit(runs, made="x"))
    inside = np.abs(error) <= Z80 * scale * sd * (1 + 1e-9)
    assert inside.mean() >= COVERAGE
    assert inside.mean() < 1
