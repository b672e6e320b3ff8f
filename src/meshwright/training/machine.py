"""The devices and versions that another program finds on this machine, read in a separate process.

The separate process sees the same devices as that program's workers, and this process does not import it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, MissingDependencyError, printable
from meshwright.training.parent_watch import end_with_parent, end_with_torchrun

OWN_WORKER = "MESHWRIGHT_WORKER"
"""Environment variable of workers that `engines.local` has started, whose folders its process has locked."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that an engine would use."""

    device_type: str  # as PyTorch calls it, ROCm's too
    device_name: str  # as its driver has it
    num_devices: int  # 0: none that the engine can use


def processor_name() -> str:
    """Name of this machine's processor, as records have it."""
    cpuinfo = Path("/proc/cpuinfo")
    named = processor_in(cpuinfo.read_text()) if cpuinfo.exists() else None
    return named or platform.processor() or platform.machine()


def processor_in(cpuinfo: str) -> str | None:
    """Processor's name in the text of /proc/cpuinfo; None on architectures whose kernel writes none.

    >>> processor_in("processor\\t: 0\\nmodel name\\t: AMD EPYC 9B45\\n")
    'AMD EPYC 9B45'
    """
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found and found[1].strip()


def ask(command: Sequence[str], *, program: str, hint: str) -> dict[str, Any]:
    """Run `command` and return the JSON object in its last line of output.

    Raises MissingDependencyError when it fails: `program` does not start.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingDependencyError(f"{program}: {reason}", hint=hint)
    return json.loads(done.stdout.splitlines()[-1])


def require_version(package: str, version: str, *, hint: str) -> None:
    """Raise MissingDependencyError when `package` is absent or of another version."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        message = f"this needs {package} {version}, which is not installed"
        raise MissingDependencyError(message, hint=hint) from None
    if found != version:
        raise MissingDependencyError(
            f"this version of Meshwright works with {package} {version}, and {found} is installed", hint=hint
        )


def main_or_refuse(main: Callable[[Path], int | None]) -> None:
    """Run a worker's `main` on the path in its arguments; an error is one line on stderr and its own exit code.

    The worker ends with the process that started it: torchrun, or `engines.local`.
    """
    if OWN_WORKER in os.environ:
        end_with_parent()
    else:
        end_with_torchrun()
    try:
        sys.exit(main(Path(sys.argv[1])))
    except MeshwrightError as error:
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
