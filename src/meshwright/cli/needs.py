"""Optional packages that a command needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from meshwright.cli.output import progress
from meshwright.errors import MissingDependencyError
from meshwright.targets import load
from meshwright.training.cpu_libraries import configure_libraries


def require_torch(what: str) -> None:
    """Raise MissingDependencyError (exit code 3) if PyTorch is absent. `what` begins the message: "training".

    Sets the environment that PyTorch's libraries read when they are loaded.
    """
    configure_libraries()
    if find_spec("torch") is None:
        raise MissingDependencyError(
            f"{what} needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )


def load_with_torch(target: str, *, what: str) -> Any:
    """Import "module:attribute", whose module imports PyTorch (seconds); otherwise as `require_torch`."""
    require_torch(what)
    with progress("starting PyTorch"):
        return load(target)
