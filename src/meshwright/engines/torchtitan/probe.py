"""What torchtitan finds on this machine: `python -m meshwright.engines.torchtitan.probe` prints one JSON object."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict, dataclass

from meshwright.engines.torchtitan import VERSION
from meshwright.errors import MissingDependencyError
from meshwright.training import machine as machines

INSTALL = "pip install 'meshwright[torchtitan]'"


@dataclass(frozen=True, kw_only=True)
class Machine(machines.Machine):
    """The devices that torchtitan would use, and what this PyTorch lacks."""

    torch: str
    lacks: tuple[str, ...]  # of PyTorch, which torchtitan calls in every training
    lacks_in_pipeline: tuple[str, ...]


def machine() -> Machine:
    """Ask. Raises MissingDependencyError when torchtitan is absent, of another version, or does not start."""
    require_version()
    command = [sys.executable, "-m", "meshwright.engines.torchtitan.probe"]
    found = machines.ask(command, program="torchtitan does not start here", hint=INSTALL)
    return Machine(
        **found | {"lacks": tuple(found["lacks"]), "lacks_in_pipeline": tuple(found["lacks_in_pipeline"])}
    )


def require_version() -> None:
    """Raises MissingDependencyError when torchtitan is absent or of another version."""
    machines.require_version("torchtitan", VERSION, hint=INSTALL)


def require_device(machine: Machine) -> None:
    """Raises MissingDependencyError where torchtitan cannot train."""
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


def found() -> Machine:
    """What is found in this process."""
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
    return Machine(
        device_type=kind,
        device_name=module.get_device_name(torch.device(kind, 0)) if count else "none",
        num_devices=count,
        torch=torch.__version__,
        lacks=tuple(lacks),
        lacks_in_pipeline=tuple(pipeline),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(found())))
