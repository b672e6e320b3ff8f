"""What a command needs beside the base install."""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.errors import MissingDependencyError


def require_torch(what: str) -> None:
    """Stop with exit code 3 when PyTorch is absent. `what` begins the message: "training"."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            f"{what} needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )
