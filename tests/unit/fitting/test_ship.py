"""`python -m meshwright.fitting.ship` and what it writes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import from_document, prior
from meshwright.cost.uncertainty import Z80
from meshwright.fitting import ship as module
from meshwright.fitting.leave_one_source_out import UnseenErrors, held_out
from meshwright.fitting.published_runs import fit
from meshwright.fitting.ship import COVERAGE, main, with_intervals

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
    runs = [r for r in read_runs(few) if r.reason is None]
    errors = held_out(runs, fit(runs, made="x"))
    factors = np.array([written[0]["interval_factors"][name] for name in errors.case_class.tolist()])
    added = from_document(written[0]).added_variance(errors.is_moe, errors.unstated)
    sd = np.sqrt(errors.sd**2 + added)
    inside = np.abs(errors.error) <= Z80 * written[0]["interval_scale"] * factors * sd * (1 + 1e-3)
    assert inside.mean() >= COVERAGE
    assert inside.mean() < 1


@pytest.mark.parametrize("informative", [True, False])
def test_a_floor_where_standard_deviations_say_nothing_of_errors(informative):
    random = np.random.default_rng(0)
    sd = np.exp(random.normal(-2.5, 0.8, 400))
    error = random.normal(0, sd if informative else np.full(400, 0.1))
    errors = UnseenErrors(
        error=error, sd=sd, case_class=np.array(["dense, many sources"] * 400), unstated=np.zeros(400)
    )
    floor = with_intervals(prior(), errors).interval_floors["dense"]
    assert floor == 0 if informative else floor >= 0.1


@pytest.mark.parametrize("matters", [True, False])
def test_mixtures_are_wider_where_unstated_switches_go_with_errors(matters):
    """Of 400 dense models with small errors and 400 mixtures, whose errors may grow with what is not stated."""
    random = np.random.default_rng(0)
    unstated = np.tile([0.0, 1.0], 400)
    is_moe = np.repeat([False, True], 400)
    true_sd = np.where(is_moe, np.where(matters & (unstated > 0), 0.4, 0.1), 0.05)
    errors = UnseenErrors(
        error=random.normal(0, true_sd),
        sd=np.full(800, 0.02),
        case_class=np.where(is_moe, "moe, many sources", "dense, many sources"),
        unstated=unstated,
    )
    found = with_intervals(prior(), errors)
    variance = found.added_variance(errors.is_moe, unstated)
    assert set(variance[~is_moe]) == {found.interval_floors["dense"] ** 2}
    if matters:
        assert found.unstated_sd >= 0.2
        assert min(variance[is_moe & (unstated > 0)]) > 4 * max(variance[is_moe & (unstated == 0)])
    else:
        assert found.unstated_sd <= 0.1


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
