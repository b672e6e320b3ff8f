"""Search for a Python interpreter of a version: this one, on PATH, of pyenv, of uv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PythonVersion = tuple[int, int]
NEWEST_ON_PATH = 13
"""Minor version of the newest `python3.N` that is looked up on PATH if no newest version is given."""
ASK = "import sys; print(*sys.version_info[:3]); import ensurepip, venv"


@dataclass(frozen=True, kw_only=True)
class PythonCandidate:
    """A location that was searched for Python, and the result."""

    location: str
    found: str
    python: Path | None = None  # the interpreter, if its version is suitable


def search_python(
    *, oldest: PythonVersion, newest: PythonVersion | None = None, given: str | None = None
) -> list[PythonCandidate]:
    """Search for Python in all locations, in order, up to the first suitable one. Each interpreter is run.

    `given` is a path or the name of a program, and then the only location.
    """
    candidates = []
    for location, command in _locations(oldest, newest, given):
        candidates.append(_try(location, command, oldest=oldest, newest=newest))
        if candidates[-1].python:
            break
    return candidates


def output_of(command: Sequence[str]) -> str | None:
    """Return the output of a command; None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _locations(
    oldest: PythonVersion, newest: PythonVersion | None, given: str | None
) -> Iterator[tuple[str, str | None]]:
    if given is not None:
        yield f"--python {given}", given
        return
    yield "this Python", sys.executable
    last = newest[1] if newest else max(NEWEST_ON_PATH, oldest[1])
    for minor in range(oldest[1], last + 1):
        name = f"python3.{minor}"
        yield f"{name} on PATH", shutil.which(name)
    yield from _of_pyenv(oldest, newest)
    wanted = f">=3.{oldest[1]}" + (f",<3.{newest[1] + 1}" if newest else "")
    yield "uv", output_of(["uv", "python", "find", wanted])


def _of_pyenv(oldest: PythonVersion, newest: PythonVersion | None) -> Iterator[tuple[str, str | None]]:
    root = output_of(["pyenv", "root"])
    if root is None:
        yield "pyenv", None
        return
    versions = sorted(folder for folder in Path(root, "versions").glob("3.*") if _is_of(folder.name, oldest, newest))
    if not versions:
        yield f"pyenv's versions in {root}", None
    for version in versions:
        yield f"pyenv's {version.name}", str(version / "bin" / "python")


def _is_of(name: str, oldest: PythonVersion, newest: PythonVersion | None) -> bool:
    """Return True if a folder is named after a version of the range."""
    minor = name.split(".")[1]
    return minor.isdigit() and oldest[1] <= int(minor) <= (newest[1] if newest else int(minor))


def _try(location: str, command: str | None, *, oldest: PythonVersion, newest: PythonVersion | None) -> PythonCandidate:
    if command is None:
        return PythonCandidate(location=location, found="not there")
    printed = output_of([command, "-c", ASK])
    if printed is None:
        return PythonCandidate(location=location, found=f"{command} does not run, or lacks venv")
    version = tuple(map(int, printed.split()))
    is_suitable = oldest <= version and (newest is None or version[:2] <= newest)
    found = f"Python {'.'.join(map(str, version))}"
    return PythonCandidate(location=location, found=found, python=Path(command) if is_suitable else None)
