"""Devices that JAX detects in MaxText's environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.engines.maxtext import environment
from meshwright.training.machine import Machine, ask, processor_name

ASK = """
import json, jax
devices = jax.devices()
kind = "cpu" if devices[0].platform == "cpu" else "cuda"
print(json.dumps({"device_type": kind, "device_name": devices[0].device_kind, "num_devices": len(devices)}))
"""


def machine(python: Path) -> Machine:
    """Detect the machine with the interpreter `python`. Raises MissingDependencyError when JAX does not start there."""
    folder = python.parent.parent
    values = ask(
        [str(python), "-c", ASK],
        program=f"JAX does not start in {folder}",
        hint=f"remove it, and {environment.COMMAND}",
    )
    found = Machine(**values)
    return replace(found, device_name=processor_name()) if found.device_type == "cpu" else found
