"""Conditions of a training outside of its run file: environment variables, and the limits of its device."""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DECISIVE = re.compile(
    r"(AITER|CUBLAS|CUBLASLT|CUDA|CUDNN|DNNL|FI|GLOO|GOMP|GPU|HIP|HIPBLASLT|HSA|JAX|KMP|LIBTPU|MALLOC|MIOPEN|MKL|NCCL|"
    r"NVTE|NVSHMEM|OMP|ONEDNN|PYTORCH|RCCL|ROCR|TORCH|TORCHINDUCTOR|TRITON|UCX|XLA)_\w+|LD_PRELOAD"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY\b")
MOST_CHARACTERS = 1000
SMI = ("nvidia-smi", "--query-gpu=power.limit,clocks.max.sm", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0


def environment_facts(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that libraries of computation and communication read, without names of a host or a user.

    >>> environment_facts({"NCCL_IB_HCA": "=mlx5_0", "HF_TOKEN": "hf_x", "HOME": "/root"})
    {'NCCL_IB_HCA': '=mlx5_0'}
    """
    held = os.environ if environment is None else environment
    named = {name: value for name, value in held.items() if DECISIVE.fullmatch(name) and not SECRET.search(name)}
    return {name: _anonymous(named[name])[:MOST_CHARACTERS] for name in sorted(named)}


def _anonymous(text: str) -> str:
    user = ""
    with suppress(OSError, KeyError):  # a process whose user has no name
        user = getpass.getuser()
    for own, shown in ((str(Path.home()), "~"), (platform.node(), "HOST"), (user, "USER")):
        if own and own != "/":
            text = re.sub(rf"(?<!\w){re.escape(own)}(?!\w)", shown, text)
    return text


def device_limits(*, is_amd: bool, identifier: str, root: Path = Path("/")) -> dict[str, float | None]:
    """Return power limit and highest clock of a GPU by its driver; None is what it does not report.

    `identifier`: the UUID of a device of NVIDIA, the address on the PCI bus of one of AMD.
    """
    power, clock = _of_amd(root, identifier) if is_amd else _of_nvidia(identifier)
    return {"power_limit_w": power, "highest_clock_mhz": clock}


def _of_nvidia(identifier: str) -> tuple[float | None, float | None]:
    try:
        done = subprocess.run(
            [*SMI, f"--id={identifier}"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        power, clock = (float(cell) if _is_number(cell) else None for cell in done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return power, clock


def _of_amd(root: Path, address: str) -> tuple[float | None, float | None]:
    folder = root / "sys/bus/pci/devices" / address.lower()
    try:
        cap = next(iter(sorted(folder.glob("hwmon/hwmon*/power1_cap"))), None)
        power = None if cap is None else int(cap.read_text()) / 1e6
        clocks = re.findall(r":\s*(\d+)Mhz", (folder / "pp_dpm_sclk").read_text(), re.IGNORECASE)
    except (OSError, ValueError):
        return None, None
    return power, max(map(float, clocks), default=None)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\s*\d+(\.\d+)?\s*", cell) is not None
