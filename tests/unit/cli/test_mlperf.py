"""`meshwright mlperf`: documents and exit codes that scripts read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.mlperf.check_system import SYSTEM_FIELDS


def called(meshwright, *arguments):
    """Exit code, stdout and stderr of a command line."""
    outcome = meshwright(*arguments)
    return outcome.exit_code, outcome.stdout, outcome.stderr


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "llama2_70b_lora"
    for i in range(10):
        SyntheticLog(seed=i, evaluations=5 + i % 2).write(folder / f"result_{i}.txt")
    return folder


def test_score_of_one_folder_is_flat(meshwright, runs):
    code, out, _ = called(meshwright, "mlperf", "score", str(runs), "--round", "5.1", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["passes"] is True
    assert document["raw_min"] == document["score_min"]
    assert document["rcp_scaling"] == 1.0
    assert document["label"].endswith("Result not verified by MLCommons Association")
    assert document["prospect"] is None


def test_score_of_some_runs_says_how_likely_a_set_passes(meshwright, runs):
    code, out, _ = called(meshwright, "mlperf", "score", str(runs), "--round", "5.1", "--runs", "4", "--json")
    assert code == 1
    assert 0.5 < json.loads(out)["prospect"]["probability"] <= 1.0
    assert "passes with probability" in called(meshwright, "mlperf", "score", str(runs), "--runs", "4")[1]


def test_score_of_a_tree_lists_sets_and_what_is_skipped(meshwright, runs):
    (runs.parent / "bert").mkdir()
    (runs.parent / "bert" / "result_0.txt").write_text("text")
    code, out, err = called(meshwright, "mlperf", "score", str(runs.parent), "--round", "5.1", "--json")
    document = json.loads(out)
    assert (code, len(document["sets"]), len(document["skipped"])) == (0, 1, 1)
    assert "is not scored" in err


def test_check_exits_by_what_it_finds(meshwright, runs):
    code, out, _ = called(meshwright, "mlperf", "check", str(runs), "--round", "5.1", "--no-official", "--json")
    document = json.loads(out)
    assert (code, document["passes"], document["findings"], document["official"]) == (0, True, [], None)
    log = SyntheticLog(seed=3)
    log.row("run_stop")["metadata"]["status"] = "aborted"
    log.write(runs / "result_3.txt")
    code, out, _ = called(meshwright, "mlperf", "check", str(runs), "--round", "5.1", "--no-official", "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert (finding["file"], finding["rule"], finding["severity"]) == ("result_3.txt", "status", "error")
    assert finding["line"] == len(log.rows)
    assert finding["why"]
    assert finding["fix"]


def test_check_of_an_unfinished_log(meshwright, runs):
    path = runs / "result_0.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:30]))
    arguments = ("mlperf", "check", str(path), "--round", "5.1", "--no-official")
    assert called(meshwright, *arguments)[0] == 1
    code, out, _ = called(meshwright, *arguments, "--unfinished")
    assert code == 0
    assert "still to come: run_stop" in out


def test_compare_of_published_results(meshwright):
    code, out, _ = called(
        meshwright,
        "mlperf",
        "compare",
        "--benchmark",
        "llama31_8b",
        "--accelerator",
        "MI355X",
        "--devices",
        "8",
        "--json",
    )
    (group,) = json.loads(out)["groups"]
    assert code == 0
    assert group["maker"]["score_min"] == pytest.approx(99.709, abs=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("score", "absent"),
        ("score", "llama2_70b_lora", "--round", "5.2"),
        ("check", "absent"),
        ("compare", "--round", "4.1"),
        ("compare", "--benchmark", "bert"),
        ("rcp", "absent", "--creator", "a", "--platform", "b"),
    ],
)
def test_wrong_input(meshwright, runs, monkeypatch, arguments):
    monkeypatch.chdir(runs.parent)
    code, out, err = called(meshwright, "mlperf", *arguments)
    assert code == 2
    assert "error" in err + out
    assert "Traceback" not in err


def test_a_disk_that_fills_while_code_is_copied_is_named(meshwright, runs, tmp_path, monkeypatch):
    system = tmp_path / "sys8.json"
    values = {**dict.fromkeys(SYSTEM_FIELDS, ""), "submitter": "Org", "division": "closed", "status": "Preview"}
    system.write_text(json.dumps({**values, "number_of_nodes": "1", "accelerators_per_node": "8"}))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "README.md").write_text("How to run\n")

    def full(source, target, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copied = shutil.copytree
    monkeypatch.setattr(shutil, "copytree", lambda *args, **options: copied(*args, **options, copy_function=full))
    outcome = meshwright(
        "mlperf", "package", runs, "--org", "Org", "--system", system, "--code", tmp_path / "code", "--out",
        tmp_path / "out", "--round", "5.1",
    )  # fmt: skip
    assert outcome.exit_code == 2, outcome
    assert "No space left" in outcome.stderr
    assert "README.md" in outcome.stderr


def test_the_page_of_a_comparison_names_each_system(meshwright, tmp_path):
    page = tmp_path / "results.html"
    asked = ("mlperf", "compare", "--benchmark", "llama31_8b", "--devices", 8)
    outcome = meshwright(*asked, "--html", page)
    assert outcome.exit_code == 0, outcome.stderr
    text = page.read_text()
    results = [r for g in meshwright(*asked, "--json").json["groups"] for r in g["results"]]
    assert len(results) > 10
    assert all(f'<td class="text">{r["system"]}</td>' in text for r in results)
    assert "Minutes to the target" in text
    assert "status" not in outcome.stdout  # all are published


def test_shapes_of_a_named_cluster_are_planned_without_its_devices(meshwright):
    line = ("mlperf", "run", "llama31_8b", "--shape", "--set", "cluster=h100-8x1", "--dry-run", "--json")
    planned = meshwright(*line).json
    assert planned["step_s"] is None
    assert 40 * 2**30 < planned["memory_bytes"] < 80 * 2**30
    refused = meshwright(*line, "--set", "parallel={data_shard: 1, tensor: 8, sequence_parallel: false}", "--set",
                         "batch.micro=8")  # fmt: skip
    assert (refused.exit_code, "do not fit h100-8x1" in refused.stderr) == (1, True)
