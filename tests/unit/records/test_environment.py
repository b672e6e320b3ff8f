"""Variables that decide a speed are kept, secrets and names are not; limits of devices as their drivers report them."""

from __future__ import annotations

import getpass
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.records import environment
from meshwright.records.environment import device_limits, environment_facts

KEPT = {
    "NCCL_IB_HCA": "=mlx5_0,mlx5_1", "RCCL_MSCCL_ENABLE": "0", "TORCH_NCCL_BLOCKING_WAIT": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1", "OMP_NUM_THREADS": "8", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "LD_PRELOAD": "libjemalloc.so",
}  # fmt: skip
LEFT_OUT = {
    "HF_TOKEN": "hf_x", "WANDB_API_KEY": "x", "HOME": "/root", "NCCL_AUTH_TOKEN": "x", "TORCHELASTIC_RUN_ID": "7",
    "MASTER_ADDR": "10.0.0.1", "XNCCL_DEBUG": "INFO", "OMP_": "1",
}  # fmt: skip


def test_what_decides_a_speed_is_kept_and_nothing_else():
    assert environment_facts(LEFT_OUT | KEPT) == dict(sorted(KEPT.items()))


def test_names_of_host_user_and_home_are_not_kept():
    user, host, home = getpass.getuser(), platform.node(), Path.home()
    given = {
        "NCCL_DEBUG_FILE": f"{home}/nccl-{user}.{host}.log",
        "TORCH_HOME": f"{home}/{user}-files",
        "OMP_X": "x" * 5000,
    }
    found = environment_facts(given)
    assert found["NCCL_DEBUG_FILE"] == "~/nccl-USER.HOST.log"
    assert found["TORCH_HOME"] == "~/USER-files"
    assert len(found["OMP_X"]) == environment.MOST_CHARACTERS


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [("700.00, 1980\n", (700.0, 1980.0)), ("[N/A], 1980\n", (None, 1980.0)), ("No devices were found\n", (None, None))],
)
def test_limits_of_a_device_of_nvidia(stdout, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or SimpleNamespace(stdout=stdout))
    assert tuple(device_limits(is_amd=False, identifier="GPU-1").values()) == expected
    assert asked[0][-1] == "--id=GPU-1"


def test_without_a_driver_there_are_no_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "SMI", (str(tmp_path / "absent"),))
    nothing = {"power_limit_w": None, "highest_clock_mhz": None}
    assert device_limits(is_amd=False, identifier="GPU-1") == nothing
    assert device_limits(is_amd=True, identifier="0000:05:00.0", root=tmp_path) == nothing


def test_limits_of_a_device_of_amd(tmp_path):
    folder = tmp_path / "sys/bus/pci/devices/0000:c5:00.0"
    (folder / "hwmon/hwmon3").mkdir(parents=True)
    (folder / "hwmon/hwmon3/power1_cap").write_text("1400000000\n")
    (folder / "pp_dpm_sclk").write_text("0: 500Mhz\n1: 133Mhz *\n2: 2400Mhz\n")
    found = device_limits(is_amd=True, identifier="0000:C5:00.0", root=tmp_path)
    assert found == {"power_limit_w": 1400.0, "highest_clock_mhz": 2400.0}
