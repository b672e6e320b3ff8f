"""Look up of programs that are started by name, and the command that installs optional packages."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path


def find_program(name: str) -> str | None:
    """Return the path of a program on PATH or, for scripts of installed packages, beside this Python.

    The folder of an environment's scripts is on PATH only where the environment was activated: `.venv/bin/python -m
    meshwright` and services start without it.
    """
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


@cache
def install_command(extra: str) -> str:
    """Command that installs the packages of one of this project's extras, by their own names.

    An installed wheel has no index to take `meshwright[EXTRA]` from.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("meshwright") or []
    except PackageNotFoundError:  # the sources are on the path, not installed
        return f"pip install '.[{extra}]' in the checkout"
    return f"pip install {' '.join(sorted(_packages(extra, lines)))}"


def _packages(extra: str, lines: Sequence[str]) -> set[str]:
    """Requirements of `extra` and of the extras in it, quoted for a shell.

    >>> _packages("y", ["a>=1", "b>=2; extra == 'x'", "meshwright[x]; extra == 'y'", "c; extra == 'z'"])
    {"'b>=2'"}
    """
    found = set[str]()
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not re.search(f"extra == [\"']{re.escape(extra)}[\"']", marker):
            continue
        system = re.search(r"sys_platform == [\"'](\w+)", marker)
        if system and system[1] != sys.platform:
            continue
        inner = re.fullmatch(r"meshwright\[([\w,-]+)\]", requirement.strip())
        found |= _packages(inner[1], lines) if inner else {f"'{requirement.strip()}'"}
    return found


def with_found_program(command: Sequence[str]) -> list[str]:
    """Return `command` with the path of its program, or unchanged if it is empty or there is no such program.

    >>> with_found_program([]), with_found_program(["no-such-program", "-x"])
    ([], ['no-such-program', '-x'])
    """
    return [find_program(word) or word if at == 0 else word for at, word in enumerate(command)]
