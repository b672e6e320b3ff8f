"""The prepared command takes its measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_the_shortest_of_the_prepared_measurements(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", "device", "--budget", "30", "--out", tmp_path],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    (entry,) = json.loads((tmp_path / "gpu.json").read_text())["measurements"]
    assert entry["exit_code"] == 0, done.stderr
    assert entry["device"]["type"] == "cuda"
