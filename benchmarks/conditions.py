"""What every record says of its measurement: date, commit and machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from meshwright.training.machine import processor_name
from meshwright.training.telemetry import git_commit


def conditions() -> dict[str, str | None]:
    """Date (UTC), commit of the checkout and machine of a measurement that ends now."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
