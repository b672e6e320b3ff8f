import csv
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path

SUMMARY_KEYS = {
    "median_abs_error", "p90_abs_error", "bias", "num_predicted", "num_rows", "interval_coverage",
    "memory_median_abs_error", "top1_regret_mean",
}  # fmt: skip


@pytest.fixture
def few_runs(tmp_path: Path) -> Path:
    """Every fortieth shipped row: all kinds of sources, a moment's work."""
    return every_fortieth(measured_runs_path(), tmp_path / "few.csv")


@pytest.fixture
def few_failed(tmp_path: Path) -> Path:
    """Every fortieth shipped configuration that failed."""
    return every_fortieth(failed_configs_path(), tmp_path / "few_failed.csv")


def every_fortieth(table: Path, path: Path) -> Path:
    with table.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        rows = [next(reader), *islice(reader, 0, None, 40)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_json_has_the_promised_shape(meshwright: Callable[..., Any], few_runs: Path) -> None:
    outcome = meshwright("accuracy", "--runs", str(few_runs), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document["summary"].keys() >= SUMMARY_KEYS
    assert document["summary"]["num_rows"] == len(document["rows"]) == 77
    assert document["summary"]["num_predicted"] >= 55
    assert document["failed"] is None
    for kind in ("source", "accelerator", "architecture", "size"):
        for metrics in document["groups"][kind].values():
            assert metrics.keys() >= SUMMARY_KEYS
    predicted = [row for row in document["rows"] if row["predicted"]]
    assert all(row["low"] <= row["predicted"] <= row["high"] for row in predicted)
    assert all(row.get("reason") for row in document["rows"] if row["signed_error"] is None)


def test_tables_and_files(meshwright: Callable[..., Any], few_runs: Path, few_failed: Path, tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "rows.csv"
    outcome = meshwright(
        "accuracy", "--runs", str(few_runs), "--failed", str(few_failed),
        "--by", "accelerator", "--rows", "--html", str(page), "--csv", str(table),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("Error of tokens/s per device", "By accelerator", "h100", "Not predicted", "Does it fit"):
        assert words in outcome.stdout
    assert "<svg" in page.read_text(encoding="utf-8")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 78


@pytest.mark.parametrize(
    ("content", "message"), [("", "is empty"), ("id,model\nx,y\n", "missing columns"), (None, "cannot read")]
)
def test_a_broken_file_exits_with_2_and_one_message(
    meshwright: Callable[..., Any], tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "broken.csv"
    if content is not None:
        path.write_text(content)
    outcome = meshwright("accuracy", "--runs", str(path), "--json")
    assert outcome.exit_code == 2
    assert message in outcome.json["error"]["message"]
    assert "Traceback" not in outcome.stderr


def test_a_file_without_a_row_that_can_be_predicted_is_reported(meshwright: Callable[..., Any], few_runs: Path) -> None:
    lines = few_runs.read_text(encoding="utf-8").splitlines(keepends=True)
    few_runs.write_text(lines[0], encoding="utf-8")  # the header alone
    outcome = meshwright("accuracy", "--runs", str(few_runs), "--failed", str(few_runs), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["summary"]["num_rows"] == 0
    assert outcome.json["summary"]["median_abs_error"] is None
