"""Optional packages that a command needs."""

from __future__ import annotations

from typing import Any

from meshwright.cli.output import progress
from meshwright.targets import load
from meshwright.training.cpu_libraries import require_torch


def load_with_torch(target: str, *, what: str) -> Any:
    """Import "module:attribute", whose module imports PyTorch (seconds); otherwise as `require_torch`."""
    require_torch(what)
    with progress("starting PyTorch"):
        return load(target)
