"""What MaxText's environment finds on this machine, asked in a process of its own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from meshwright.engines.maxtext import environment
from meshwright.errors import MissingDependencyError

ASK = """
import json, platform, jax
devices = jax.devices()
cpu = platform.processor() or platform.machine()
name = cpu if devices[0].platform == "cpu" else devices[0].device_kind
print(json.dumps({"platform": devices[0].platform, "device_name": name, "num_devices": len(devices)}))
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that MaxText would use."""

    platform: str  # as JAX calls it: cpu, gpu
    device_name: str
    num_devices: int


def machine(python: Path) -> Machine:
    """Ask. Raises MissingDependencyError when JAX does not start there."""
    done = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingDependencyError(
            f"JAX does not start in {python.parent.parent}: {words}",
            hint=f"remove it, and {environment.COMMAND}",
        )
    return Machine(**json.loads(done.stdout.splitlines()[-1]))
