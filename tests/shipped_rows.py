"""The published runs that ship, read once by each process of a test run (`conftest.py`)."""

from __future__ import annotations

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path


def shipped_runs() -> list[PublishedRun]:
    """All rows of measured runs."""
    return read_runs(measured_runs_path())
