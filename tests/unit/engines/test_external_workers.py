"""The commands that exports print say in one line what is missing, as `train` does."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.engines.local import write_files


@pytest.mark.parametrize(("engine", "package"), [("torchtitan", "torchtitan"), ("megatron", "megatron")])
def test_a_worker_without_its_devices_is_refused(engine, package, small_run, tmp_path, monkeypatch):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    asked = "import torch; print(torch.accelerator.is_available())"
    if "True" in subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout:
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
