"""Devices that Megatron detects: `python -m meshwright.engines.megatron.probe` prints them as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec

from meshwright.engines.megatron import VERSION
from meshwright.errors import MissingDependencyError
from meshwright.programs import install_command
from meshwright.training.machine import Machine, ask, require_version


def machine() -> Machine:
    """Detect the machine in a separate process.

    Raises MissingDependencyError when Megatron-Core is absent, of another version, or does not start.
    """
    require_version("megatron-core", VERSION, hint=install_command("megatron"))
    if find_spec("psutil") is None:
        raise MissingDependencyError("megatron-core's checkpoints need psutil", hint=install_command("megatron"))
    command = [sys.executable, "-m", "meshwright.engines.megatron.probe"]
    return Machine(**ask(command, program="megatron-core does not start here", hint=install_command("megatron")))


def require_device(machine: Machine) -> None:
    """Raise MissingDependencyError if Megatron cannot train on `machine`."""
    if not machine.num_devices:
        raise MissingDependencyError(
            f"megatron-core {VERSION} needs a CUDA device, and this machine has none: its layers allocate CUDA memory",
            hint="--set engine=native trains on this machine's CPU",
        )


def detect() -> Machine:
    """Detect the machine in this process."""
    import megatron.core.models.gpt  # noqa: F401  fails now if a package is missing
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        device_type=torch.empty(0, device="cuda").device.type if count else "none",
        device_name=torch.cuda.get_device_name(0) if count else "none",
        num_devices=count,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(detect())))
