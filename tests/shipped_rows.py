"""The published runs that ship, read once by each process of a test run.

`read_runs` remembers two files, and most tests of it write files of their own.
"""

from __future__ import annotations

from functools import cache

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path


@cache
def shipped_runs() -> tuple[PublishedRun, ...]:
    """All rows of measured runs."""
    return tuple(read_runs(measured_runs_path()))
