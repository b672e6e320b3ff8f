"""`meshwright train` on this machine starts as many processes as the run file's degrees need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import TEXT


@pytest.mark.distributed
def test_a_file_that_names_one_degree_trains_on_that_many_processes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{TEXT}parallel: {{tensor: 2}}\n")
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "train",
        "run.yaml",
        "--out",
        "out",
        "--no-measure",
        "--only-steps",
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert (record["ending"], record["run"]["plan"]["tensor"], record["run"]["plan"]["data_shard"]) == (
        "done",
        2,
        1,
    )
    assert len(record["ranks"]["step_s"]) == 2
    assert len((tmp_path / "out" / "steps.jsonl").read_text().splitlines()) == 3
