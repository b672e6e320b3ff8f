"""What Megatron finds on this machine: `python -m meshwright.engines.megatron.probe` prints one JSON object.

A process of its own, so that what is asked is what its workers will find, and the one that asks stays small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

from meshwright.engines.megatron import VERSION
from meshwright.errors import MissingDependencyError

INSTALL = "pip install 'meshwright[megatron]'"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that Megatron would use."""

    device_type: str
    device_name: str
    num_devices: int  # 0: none that Megatron can use


def machine() -> Machine:
    """Ask. Raises MissingDependencyError when Megatron-Core is absent, of another version, or does not start."""
    _require_version()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.engines.megatron.probe"], capture_output=True, text=True
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingDependencyError(f"megatron-core does not start here: {words}", hint=INSTALL)
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def _require_version() -> None:
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        words = f"this needs megatron-core {VERSION}, which is not installed"
        raise MissingDependencyError(words, hint=INSTALL) from None
    if found != VERSION:
        raise MissingDependencyError(
            f"this version of Meshwright works with megatron-core {VERSION}, and {found} is installed",
            hint=INSTALL,
        )
    if find_spec("psutil") is None:
        raise MissingDependencyError("megatron-core's checkpoints need psutil", hint=INSTALL)


def _found() -> Machine:
    import megatron.core.models.gpt  # noqa: F401  what it needs, it says now
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        device_type=torch.empty(0, device="cuda").device.type if count else "none",
        device_name=torch.cuda.get_device_name(0) if count else "none",
        num_devices=count,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_found())))
