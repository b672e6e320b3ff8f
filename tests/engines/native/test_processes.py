"""Several processes: a lost one is replaced, a stopped run stops everywhere, another plan goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.engines.native import checkpoint

TEXT = """
model:
  name: tiny
  hidden: 32
  num_layers: 2
  vocab: 64
  ffn_hidden: 64
  attention: {num_heads: 4, num_kv_heads: 2}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4, micro: 2}
precision: fp32
cluster: here
parallel: {data_shard: 2, sharding: parameters}
optimizer: {learning_rate: 1.0e-3, schedule: constant}
train:
  steps: 200
  checkpoint: {folder: saved, every_steps: 20}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(TEXT)
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", "run.yaml", "--out", "out", "--json", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def workers_of(pid: int) -> list[int]:
    """Child processes that train: spawned, and not the tracker of shared resources."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 90
    while not checkpoint.checkpoints(folder / "saved"):
        assert time.monotonic() < deadline_s
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        time.sleep(0.005)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
def test_a_lost_process_is_replaced_and_the_run_goes_on(tmp_path):
    process = start(tmp_path, "--max-restarts", "1")
    wait_for_checkpoint(tmp_path, process)
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "was lost" in stderr
    assert json.loads(stdout)["statistics"]["steps"] == 200
    assert len(losses(tmp_path)) == 200


@pytest.mark.distributed
@pytest.mark.slow
def test_sigterm_stops_all_and_another_plan_goes_on(tmp_path):
    process = start(tmp_path)
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    taken = json.loads(stdout)["statistics"]["steps"]
    assert taken < 200
    process = start(tmp_path, "--resume", "--set", "parallel={pipeline: 2, data_shard: 1}")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    resharded = losses(tmp_path)
    assert len(resharded) == 200

    alone = tmp_path / "alone"
    alone.mkdir()
    process = start(alone, "--set", "parallel=auto")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert resharded == pytest.approx(losses(alone), rel=1e-4)
