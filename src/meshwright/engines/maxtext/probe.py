"""What MaxText's environment finds on this machine."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines.machine import Machine, ask
from meshwright.engines.maxtext import environment

ASK = """
import json, platform, jax
devices = jax.devices()
is_cpu = devices[0].platform == "cpu"
name = platform.processor() or platform.machine() if is_cpu else devices[0].device_kind
found = {"device_type": "cpu" if is_cpu else "cuda", "device_name": name, "num_devices": len(devices)}
print(json.dumps(found))
"""


def machine(python: Path) -> Machine:
    """Ask. Raises MissingDependencyError when JAX does not start there."""
    folder = python.parent.parent
    found = ask(
        [str(python), "-c", ASK],
        program=f"JAX does not start in {folder}",
        hint=f"remove it, and {environment.COMMAND}",
    )
    return Machine(**found)
