"""Conditions of a measurement that its record states: date, commit and machine."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

from meshwright.training.machine import processor_name
from meshwright.training.telemetry import git_commit


def processor() -> str:
    """Name of the processor, with the numbers of its kind: hosts of virtual machines often name the series alone."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    kind = (re.search(rf"^{key}\s*:\s*(\d+)$", text, re.MULTILINE) for key in ("cpu family", "model"))
    numbers = [found[1] for found in kind if found]
    return f"{processor_name()} (family {', model '.join(numbers)})" if len(numbers) == 2 else processor_name()


def conditions() -> dict[str, str | None]:
    """Date (UTC), commit of the checkout and machine of a measurement that ends now."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
