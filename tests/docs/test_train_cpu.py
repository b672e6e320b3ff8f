"""The page of the CPU training benchmark says what its record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import train_cpu

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "train-cpu.md"
RECORD = ROOT / "benchmarks" / "records" / "train_cpu.json"


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_the_record(record, tmp_path):
    assert train_cpu.measured_part(record) in PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(f"before\n{train_cpu.BEGIN}\nold\n{train_cpu.END}\nafter\n", encoding="utf-8")
    train_cpu.write_page(copy, record)
    lines = copy.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines


def test_the_record_is_whole(record):
    assert {"device", "software", "commands", "date", "contenders", "git_commit"} <= record.keys()
    assert record["cases"].keys() <= {case.name for case in train_cpu.CASES}
    assert "tiny bf16" in record["cases"]
    for name, rows in record["cases"].items():
        shape = train_cpu.SHAPES[name.split()[0]]
        able = {contender for contender in train_cpu.CONTENDERS if train_cpu.can_train(contender, shape)}
        assert set(rows) == able - set(record["not_run"]), name
        assert all(row["losses_agree"] for row in rows.values()), name


def test_losses_that_differ_are_seen():
    def measured(*losses):
        return [
            train_cpu.Measured(
                losses=list(losses), tokens_per_s=1.0, tokens_per_cpu_s=2.0, start_up_s=3.0, peak_memory_bytes=4
            )
        ]

    rounds = {"meshwright": measured(8.0, 7.0), "plain loop": measured(8.0, 7.0001), "litgpt": measured(8.0, 7.1)}
    rows = train_cpu.summary(rounds, case=train_cpu.CASES[1])
    assert [row["losses_agree"] for row in rows.values()] == [True, True, False]


@pytest.mark.slow
def test_a_quick_run_measures_every_contender_that_is_installed(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "record.json"
    command = [sys.executable, train_cpu.__file__, "--quick", "--threads", "1", "--record", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"meshwright", "plain loop"} <= found["cases"]["tiny bf16"].keys()
    assert "tokens/cpu-s" in done.stdout
