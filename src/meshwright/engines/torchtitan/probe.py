"""What torchtitan finds on this machine: `python -m meshwright.engines.torchtitan.probe` prints one JSON object.

A process of its own, so that what is asked is what its workers will find, and the one that asks stays small.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

from meshwright.engines.torchtitan import VERSION
from meshwright.errors import MissingDependencyError

INSTALL = "pip install 'meshwright[torchtitan]'"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that torchtitan would use, and what this PyTorch lacks."""

    device_type: str
    device_name: str
    num_devices: int  # 0: none that torchtitan can use
    torch: str
    lacks: tuple[str, ...]  # of PyTorch, which torchtitan calls in every training
    lacks_in_pipeline: tuple[str, ...]


def machine() -> Machine:
    """Ask. Raises MissingDependencyError when torchtitan is absent, of another version, or does not start."""
    require_version()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.engines.torchtitan.probe"], capture_output=True, text=True
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingDependencyError(f"torchtitan does not start here: {words}", hint=INSTALL)
    found = json.loads(done.stdout.splitlines()[-1])
    return Machine(
        **found | {"lacks": tuple(found["lacks"]), "lacks_in_pipeline": tuple(found["lacks_in_pipeline"])}
    )


def require_version() -> None:
    """Raises MissingDependencyError when torchtitan is absent or of another version."""
    if find_spec("torchtitan") is None:
        raise MissingDependencyError(f"this needs torchtitan {VERSION}, which is not installed", hint=INSTALL)
    if (found := metadata.version("torchtitan")) != VERSION:
        raise MissingDependencyError(
            f"this version of Meshwright works with torchtitan {VERSION}, and {found} is installed",
            hint=INSTALL,
        )


def _found() -> Machine:
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
    print(json.dumps(asdict(_found())))
