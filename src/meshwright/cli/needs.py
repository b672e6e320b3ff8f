"""What a command needs beside the base install."""

from __future__ import annotations

import os
from importlib.util import find_spec

from meshwright.errors import MissingDependencyError


def require_torch(what: str) -> None:
    """Stop with exit code 3 when PyTorch is absent. `what` begins the message: "training".

    Call before anything imports torch: threads that wait must not spin on cores that others use.
    """
    if find_spec("torch") is None:
        raise MissingDependencyError(
            f"{what} needs PyTorch, which is not installed", hint="pip install 'meshwright[torch]'"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
