"""`python -m meshwright.fitting.ship` and what it writes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import BlindPrediction, measured_runs_path
from meshwright.calibration.parameters import from_document, prior
from meshwright.cost.uncertainty import Z80
from meshwright.fitting import ship as module
from meshwright.fitting.leave_one_source_out import UnseenErrors, held_out
from meshwright.fitting.published_runs import fit
from meshwright.fitting.ship import COVERAGE, main, memory_sd, stranger_sd, unseen_errors, with_intervals

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


@pytest.fixture(scope="module")
def written(few: Path) -> tuple[dict, str, str]:
    """(what the command wrote, its standard output, its standard error)."""
    out = few.with_name("step.json")
    command = [sys.executable, "-m", "meshwright.fitting.ship", "--runs", few, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(p.name for p in few.parent.iterdir()) == ["few.csv", "step.json"]
    return json.loads(out.read_text()), done.stdout, done.stderr


@pytest.mark.when_touched  # test_published_runs.py fits, calibration/test_parameters.py writes and reads
def test_it_writes_a_calibration_that_says_what_it_was_made_from(written):
    document, stdout, stderr = written
    assert "from 11 rows of few.csv" in document["made"]
    assert document["rows"] == {"megatron_lm_llama_ex": 3, "megatron_seqpar_paper": 8}
    assert from_document(document).num_rows("framework", "megatron-lm-2021") == 8
    assert stdout == ""
    assert "fitting 11 rows of 2 sources" in stderr


@pytest.mark.when_touched  # test_published_runs.py leaves sources out
def test_intervals_hold_the_stated_share_of_unseen_rows(few, written):
    """These two sources have no blind prediction, so that leave-one-source-out counts."""
    runs = [r for r in read_runs(few) if r.reason is None]
    errors = held_out(runs, fit(runs, made="x"))
    assert set(errors.kind) == {"dense"}
    assert share_inside(from_document(written[0]).stranger_sd["dense"], errors) >= COVERAGE


@pytest.mark.when_touched
def test_a_blind_prediction_counts_as_it_was_made(few, monkeypatch):
    runs = [r for r in read_runs(few) if r.reason is None]
    said = [
        BlindPrediction(
            id=run.id, source_key=run.source_key, commit="0", predicted=2 * (run.tokens_per_s_per_device or 0),
            low=0, high=0, fits=True,
        )
        for run in runs if run.source_key == SOURCES[1]
    ]  # fmt: skip
    monkeypatch.setattr(module, "blind_predictions", lambda: {one.id: one for one in said})
    errors = unseen_errors(runs, fit(runs, made="x"))
    assert errors.error == pytest.approx(np.log(2))
    assert set(errors.source) == {SOURCES[1]}


def errors_of(error: np.ndarray, sd: np.ndarray, *, kind: object = "dense", source: object = None) -> UnseenErrors:
    """Each row a source of its own, unless `source` says otherwise."""
    sources = np.arange(len(error)).astype(str) if source is None else np.asarray(source)
    return UnseenErrors(error=error, sd=sd, kind=np.broadcast_to(np.asarray(kind), len(error)), source=sources)


def share_inside(sd: float, errors: UnseenErrors) -> float:
    half_width = Z80 * np.hypot(errors.sd, sd) * (1 + 1e-3)
    _, index, counts = np.unique(errors.source, return_inverse=True, return_counts=True)
    return float(np.average(np.abs(errors.error) <= half_width, weights=1 / counts[index]))


def test_each_kind_has_its_own():
    random = np.random.default_rng(0)
    is_moe = np.arange(800) % 2 == 1
    errors = errors_of(
        random.normal(0, np.where(is_moe, 0.4, 0.05)), np.full(800, 0.02), kind=np.where(is_moe, "moe", "dense")
    )
    found = with_intervals(prior(), errors).stranger_sd
    assert found.keys() == {"dense", "moe"}
    for kind, sd in found.items():
        assert share_inside(sd, errors.take(errors.kind == kind)) == pytest.approx(COVERAGE, abs=0.01)


def test_none_where_parameters_say_enough():
    random = np.random.default_rng(0)
    assert stranger_sd(errors_of(random.normal(0, 0.05, 400), np.full(400, 0.06))) == 0


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(0.01, 1), st.sampled_from("abcd")), min_size=1, max_size=40))
def test_four_fifths_of_the_weight_lie_inside_and_no_less_will_do(rows):
    error, sd, source = (np.array(column) for column in zip(*rows, strict=True))
    errors = errors_of(error, sd, source=source)
    found = stranger_sd(errors)
    assert share_inside(found, errors) >= COVERAGE - 1e-9
    if found > 0.05:
        assert share_inside(0.9 * found, errors) < COVERAGE or np.min(sd) > found


def test_many_rows_of_one_source_weigh_as_one():
    """Nine sources err by a tenth; the tenth has a thousand rows and errs by all."""
    error = np.array([0.1] * 9 + [1.0] * 1000)
    errors = errors_of(error, np.full(len(error), 0.05), source=[*"abcdefghi", *"j" * 1000])
    assert Z80 * np.hypot(0.05, stranger_sd(errors)) == pytest.approx(0.1)


def test_memory_is_as_uncertain_as_the_median_source(read_many):
    """Of three sources, one off by 100 %, as it counts in a way of its own."""
    runs = read_many(
        *({"source_key": name, "mem_gb_per_gpu": 10, "notes": "max allocated", "recompute": "full"} for name in "abc"),
        {"source_key": "d"},
    )
    predicted = float(predict(runs[:1]).memory_allocated_bytes[0])
    runs = [replace(run, memory_bytes=predicted * factor) for run, factor in zip(runs, (1.0, 1.1, 2.0), strict=False)]
    assert memory_sd(runs) == pytest.approx(np.log(1.1) / NormalDist().inv_cdf(0.75), rel=1e-3)
    assert memory_sd(read_many({})) == 0


def test_a_failure_leaves_the_old_file(monkeypatch, few, tmp_path):
    out = tmp_path / "step.json"
    out.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(module, "calibrate", fail)
    monkeypatch.setattr("sys.argv", ["calibrate", "--runs", str(few), "--out", str(out)])
    with pytest.raises(RuntimeError):
        main()
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    assert out.read_text() == "old"
