"""Devices and versions that torchtitan detects: `python -m meshwright.engines.torchtitan.probe` prints them as JSON."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.engines.torchtitan import VERSION
from meshwright.errors import MissingDependencyError
from meshwright.programs import install_command
from meshwright.training.machine import Machine, ask
from meshwright.training.machine import require_version as require_installed


@dataclass(frozen=True, kw_only=True)
class TorchtitanMachine(Machine):
    """The devices that torchtitan would use, and the functions that this PyTorch lacks."""

    torch: str  # version
    lacks: tuple[str, ...]  # functions of PyTorch that torchtitan calls in every training
    lacks_in_pipeline: tuple[str, ...]


def machine() -> TorchtitanMachine:
    """Detect the machine in a separate process.

    Raises MissingDependencyError when torchtitan is absent, of another version, or does not start.
    """
    require_version()
    command = [sys.executable, "-m", "meshwright.engines.torchtitan.probe"]
    found = ask(command, program="torchtitan does not start here", hint=install_command("torchtitan"))
    lists = {name: tuple(found[name]) for name in ("lacks", "lacks_in_pipeline")}
    values: dict[str, Any] = found | lists
    return TorchtitanMachine(**values)


def require_version() -> None:
    """Raise MissingDependencyError when torchtitan is absent or of another version."""
    require_installed("torchtitan", VERSION, hint=install_command("torchtitan"))


def require_device(machine: TorchtitanMachine) -> None:
    """Raise MissingDependencyError if torchtitan cannot train on `machine`."""
    if not machine.num_devices:
        raise MissingDependencyError(
            f"torchtitan {VERSION} needs an accelerator, and this machine has none that PyTorch can use: "
            "its attention has no backward pass on a CPU",
            hint="--set engine=native trains on this machine's CPU",
        )
    if machine.lacks:
        raise MissingDependencyError(
            f"PyTorch {machine.torch} lacks {', '.join(machine.lacks)}, which torchtitan {VERSION} calls",
            hint="a nightly build of PyTorch has it",
        )


def detect() -> TorchtitanMachine:
    """Detect the machine in this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
    from torchtitan.tools import utils

    kind, module = utils.device_type, utils.device_module
    count = module.device_count() if module.is_available() else 0
    lacks = [] if hasattr(dist, "set_timeout") else ["torch.distributed.set_timeout"]
    pipeline = [
        f"{cls.__name__}.step(arg_mbs=...)"
        for cls in (PipelineScheduleSingle, PipelineScheduleMulti)
        if "arg_mbs" not in inspect.signature(cls.step).parameters
    ]
    return TorchtitanMachine(
        device_type=kind,
        device_name=module.get_device_name(torch.device(kind, 0)) if count else "none",
        num_devices=count,
        torch=torch.__version__,
        lacks=tuple(lacks),
        lacks_in_pipeline=tuple(pipeline),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(detect())))
