"""A sweep that really trains: two processes that a launcher starts, and one that refuses."""

from __future__ import annotations

import importlib.util
import shlex
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from meshwright.records.trainings import TrainingStatus, read


@pytest.mark.distributed
def test_a_launcher_starts_the_processes_of_each_training(meshwright, tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    launcher = shlex.join([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"])
    plans = "parallel={data_shard: 1, tensor: 2},{data_shard: 1, tensor: 4}"
    outcome = meshwright(
        "bench", "train", "tiny.yaml", "--sweep", plans, "--launcher", launcher, "--json",
        "--runs", 1, "--steps", 3, "--warmup", 1,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    two, four = outcome.json["configurations"]
    assert two["num_devices"] == 2
    assert two["predicted"]["step_s"]["low"] < two["predicted"]["step_s"]["high"]
    assert four["failures"][0]["reason"].startswith(
        "the native engine cannot do this run: parallel.tensor: 4"
    )
    rows = read(tmp_path / "bench-train").rows
    assert [row.status for row in rows] == [TrainingStatus.OK, TrainingStatus.REFUSED]
    assert rows[0].steps == 3
    assert rows[0].tokens_per_s_per_device == pytest.approx(64 / rows[0].step_s_median / 2)
    assert not (tmp_path / "saved").exists()  # the run file's checkpoints
    assert not (tmp_path / "runs").exists()
