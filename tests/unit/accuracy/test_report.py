import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests import predicted_rows

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.report import COLUMNS, HEADLINE, AccuracyReport, compare, write_rows
from meshwright.accuracy.rows import PublishedRun
from meshwright.errors import InputError
from meshwright.json_values import jsonable

ReadMany = Callable[..., list[PublishedRun]]


def ten_percent_high(runs: Sequence[PublishedRun]) -> Predictions:
    """20 GB per sequence of a micro-batch."""
    memory = np.array([run.conditions.plan.micro_batch * 20e9 for run in runs if run.conditions])
    return predicted_rows.ten_percent_high(runs, memory_bytes=memory)


@pytest.fixture
def report(read_many: ReadMany, read_many_failed: ReadMany) -> AccuracyReport:
    runs = read_many(
        {"id": "good"},
        {"id": "big", "mbs": 8},
        {"id": "<b>other</b>", "quality": "B-rounded", "source_key": "<b>blog</b>"},
        {"id": "swept", "source_key": "vtrain_single"},
        {"id": "silent", "seq_len": ""},
        {"id": "memory only", "tok_s_gpu_best": "", "mem_gb_per_gpu": 25, "notes": "max allocated"},
        {"id": "tensor", "gpu": "TPU v5p", "precision": "bf16", "tok_s_gpu_best": 1000},
    )
    oom = {"metric_kind": "oom"}
    failed = read_many_failed(oom | {"mbs": 8}, oom, {"metric_kind": "error"})
    return compare(runs, predict=ten_percent_high, failed=failed)


def test_summary_counts_all_rows(report: AccuracyReport) -> None:
    summary = report.summary
    assert (summary.num_rows, summary.num_predicted) == (7, 5)
    assert summary.median_abs_error == pytest.approx(0.1)
    assert summary.memory_median_abs_error == pytest.approx(0.2)
    assert report.unpredicted == {"no sequence length": 1, "no rate given": 1}


def test_every_row_is_in_one_subset_and_the_headline_excludes_the_rest(report: AccuracyReport) -> None:
    subsets = {name: m.num_rows for name, m in report.groups["subset"].items()}
    assert subsets == {
        HEADLINE: 4,
        "other quality, GPU, no sweep": 1,
        "sweep vtrain_single": 1,
        "other accelerators": 1,
    }
    assert report.headline
    assert report.headline.num_predicted == 2


def test_groups_hold_the_keys_of_the_summary(report: AccuracyReport) -> None:
    document = jsonable(report)
    for groups in document["groups"].values():
        for metrics in groups.values():
            assert metrics.keys() == document["summary"].keys()
    assert document["groups"]["accelerator"]["tpu-v5p"]["num_rows"] == 1


def test_rows_give_prediction_and_error_or_the_reason(report: AccuracyReport) -> None:
    rows = {row["id"]: row for row in jsonable(report)["rows"]}
    assert rows["good"]["predicted"] == pytest.approx(14_300)
    assert rows["good"]["signed_error"] == pytest.approx(0.1)
    assert rows["good"]["low"] < rows["good"]["predicted"] < rows["good"]["high"]
    assert "reason" not in rows["good"]
    assert (rows["silent"]["predicted"], rows["silent"]["reason"]) == (None, "no sequence length")
    assert rows["memory only"]["memory_predicted_bytes"] == 20e9
    assert rows["memory only"]["memory_measured_bytes"] == 25e9


def test_failed_configurations_and_runs_that_worked(report: AccuracyReport) -> None:
    failed = report.failed
    assert failed
    assert failed.total.correctly_rejected_ratio == pytest.approx(1 / 2)
    assert failed.total.wrongly_rejected_ratio == pytest.approx(1 / 6)  # "big" among six with conditions
    assert failed.same_sources.num_worked == 4  # only "somebody" lists failures
    assert failed.excluded == {"failed for another reason than memory": 1}


def test_without_failed_configurations_there_is_no_such_part(read_many: ReadMany) -> None:
    assert compare(read_many({}), predict=ten_percent_high).failed is None


def test_a_file_without_rows_gives_an_empty_report(read_many: ReadMany) -> None:
    report = compare(read_many(), predict=ten_percent_high)
    assert (report.summary.num_rows, report.rows, report.headline) == (0, [], None)


def test_csv_has_one_line_a_row(report: AccuracyReport, tmp_path: Path, unsynced: Callable[[Path], list[str]]) -> None:
    path = tmp_path / "out.csv"
    write_rows(report, path)
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 7
    assert (lines[0]["predicted"], lines[0]["signed_error"]) == ("14300", "0.1")
    assert lines[0]["plan"] == "CP2 DP4 zero1 mbs1"
    assert path.name not in unsynced(tmp_path)
    assert (lines[4]["predicted"], lines[4]["reason"]) == ("", "no sequence length")


def test_a_file_that_cannot_be_written_is_bad_input(report: AccuracyReport, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        write_rows(report, tmp_path / "no such folder" / "file")
