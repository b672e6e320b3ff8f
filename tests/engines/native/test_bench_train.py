"""A sweep that really trains: two processes that a launcher starts, and one that refuses."""

from __future__ import annotations

import importlib.util
import shlex
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from tests.warm_shell import WarmShell

from meshwright.records.trainings import TrainingStatus, read

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]

pytestmark = pytest.mark.distributed


@pytest.fixture
def sweep(meshwright, tmp_path, monkeypatch, tiny_text):
    """`sweep(plans)`: a sweep of the tiny run over these plans, each started by torchrun, whose ranks start warm."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    launcher = shlex.join([*TORCHRUN, str(WarmShell().folder / "meshwright-python")])

    def run(plans: str, *, exit_code: int = 0):
        outcome = meshwright(
            "bench", "train", "tiny.yaml", "--sweep", f"parallel={plans}", "--launcher", launcher, "--json",
            "--runs", 1, "--steps", 3, "--warmup", 1,
        )  # fmt: skip
        assert outcome.exit_code == exit_code, outcome.stderr
        return outcome.json["configurations"], read(tmp_path / "bench-train").rows

    return run


@pytest.mark.when_touched  # launch/test_local.py starts processes by `launch`
def test_a_launcher_starts_the_processes_of_each_training(sweep, tmp_path):
    (two,), (row,) = sweep("{data_shard: 1, tensor: 2}")
    assert two["num_devices"] == 2
    assert two["predicted"]["step_s"]["low"] < two["predicted"]["step_s"]["high"]
    assert row.status is TrainingStatus.OK
    assert row.steps == 3
    assert row.tokens_per_s_per_device == pytest.approx(64 / row.step_s_median / 2)
    assert not (tmp_path / "saved").exists()  # the run file's checkpoints
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow  # reasons of refusals: tests/unit/bench/test_training.py, and docs/guides/bench-train.md trains one
def test_what_the_processes_of_a_launcher_refuse_has_its_reason(sweep):
    (four,), (row,) = sweep("{data_shard: 1, tensor: 4}", exit_code=1)
    assert four["failures"][0]["reason"].startswith("the native engine cannot do this run: parallel.tensor: 4")
    assert row.status is TrainingStatus.REFUSED
