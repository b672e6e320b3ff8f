"""Look up of programs that are started by name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def find_program(name: str) -> str | None:
    """Return the path of a program on PATH or, for scripts of installed packages, beside this Python.

    The folder of an environment's scripts is on PATH only where the environment was activated: `.venv/bin/python -m
    meshwright` and services start without it.
    """
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def with_found_program(command: Sequence[str]) -> list[str]:
    """Return `command` with the path of its program, or unchanged if it is empty or there is no such program.

    >>> with_found_program([]), with_found_program(["no-such-program", "-x"])
    ([], ['no-such-program', '-x'])
    """
    return [find_program(word) or word if at == 0 else word for at, word in enumerate(command)]
