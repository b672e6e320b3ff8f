"""`meshwright train` on this machine starts as many processes as the run file's degrees need."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import TEXT
from tests.warm import WarmProcess


@pytest.mark.distributed
@pytest.mark.when_touched  # test_processes_start_from_nothing starts as many
def test_a_file_that_names_one_degree_trains_on_that_many_processes(tmp_path: Path) -> None:
    """Start them warm; tests/training/test_processes.py starts two from nothing."""
    (tmp_path / "run.yaml").write_text(f"{TEXT}parallel: {{tensor: 2}}\n")
    command = ["train", "run.yaml", "--out", "out", "--no-measure", "--only-steps"]
    process = WarmProcess(command, folder=tmp_path, environment=dict(os.environ))
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert (record["ending"], record["run"]["plan"]["tensor"], record["run"]["plan"]["data_shard"]) == ("done", 2, 1)
    assert len(record["ranks"]["step_s"]) == 2
    assert len((tmp_path / "out" / "steps.jsonl").read_text().splitlines()) == 3
