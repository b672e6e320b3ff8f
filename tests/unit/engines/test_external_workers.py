"""The commands that exports print say in one line what is missing, as `train` does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from meshwright import runfile
from meshwright.engines import external_workers
from meshwright.engines.base import TrainOptions, find_engine
from meshwright.engines.external_record import OutputLayout
from meshwright.engines.local import write_files
from meshwright.specs.plan import Plan
from meshwright.training.machine import Machine


@pytest.mark.parametrize(
    ("engine", "package"),
    [
        pytest.param("torchtitan", "torchtitan", marks=pytest.mark.when_touched),  # as engines/torchtitan
        pytest.param("megatron", "megatron", marks=pytest.mark.slow),  # its devices: engines/megatron
    ],
)
def test_a_worker_without_its_devices_is_refused(engine, package, small_run, tmp_path, monkeypatch):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if pytest.importorskip("torch").accelerator.is_available():
        pytest.skip("here is a device")
    monkeypatch.chdir(tmp_path)
    run = small_run(engine, "plan: data_shard: 1", "model.family=LlamaForCausalLM")
    launch = find_engine(engine).lower(run, folder=tmp_path / "out")
    write_files(launch, tmp_path / "out")
    done = subprocess.run([sys.executable, *launch.argv[1:]], capture_output=True, text=True)
    assert done.returncode == 3
    assert "MissingDependencyError" in done.stderr
    assert "Traceback" not in done.stderr


def test_on_a_cpu_one_process_of_maxtext_has_all_devices(small_run, tmp_path):
    run = small_run("maxtext", "cluster=cpu-2x1", "plan: data_shard: 2")
    assert find_engine("maxtext").lower(run, folder=tmp_path).num_processes == 1
    run = runfile.loads(runfile.pinned_text(run, run.plan), overrides=["cluster=h100-2x1"])
    assert find_engine("maxtext").lower(run, folder=tmp_path).num_processes == 2


def test_a_device_that_is_not_the_one_of_the_run_is_noted(tmp_path):
    pytest.importorskip("torch")
    run = runfile.from_options(
        model="qwen3-0.6b", cluster="h100-1x1", global_batch=1, sequence_length=1024, engine="megatron"
    )
    layout = OutputLayout(output="out", run_file="run.yaml", checkpoints=lambda folder: [])

    def notes(driver_name: str) -> tuple[str, ...]:
        machine = Machine(device_type="cuda", device_name=driver_name, num_devices=1)
        return external_workers.start(
            replace(run, plan=Plan()), options=TrainOptions(folder=tmp_path), engine="megatron",
            machine=machine, check_plan=lambda plan, run: (), layout=layout,
        ).notes  # fmt: skip

    assert notes("NVIDIA H100 80GB HBM3") == ()
    (note,) = notes("NVIDIA H200 NVL")
    assert "'NVIDIA H200 NVL'" in note
    assert "h100's peak" in note
