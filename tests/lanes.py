"""Order and deadline of a test run: the longest tests begin first, and a test that no longer fits is not begun.

Registered by the conftest.py of the repository. `docs/reference/testing.md` describes the lanes.

    --until TIME      begin no test after this moment (seconds since 1970); print what was not reached
    --rotate NUMBER   begin with another file on another day: a slow lane that never reaches its end
                      comes to all its files within a few days
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable

import pytest

LONGEST_FIRST = (
    "tests/engines/maxtext",
    "tests/engines/megatron",
    "tests/engines/torchtitan",
    "tests/engines/native/test_resume.py",
    "tests/engines/launch",
    "tests/engines/native",
    "tests/training",
    "tests/test_project.py",
    "tests/unit/fitting",
    "tests/unit/bench",
    "docs",
)
"""Files below these begin first, in this order: a long one that begins last keeps one process waiting for another."""
FILES_A_DAY = 5
"""By how many files the beginning moves with each number of --rotate; about as many as are surely reached."""
NOT_REACHED = "not reached before the deadline"


gc.disable()  # what tests and their modules allocate while they are collected stays


def pytest_collection_finish() -> None:
    """Let no later garbage collection look at a million objects of tests, modules and PyTorch again."""
    gc.freeze()
    gc.unfreeze = lambda: None  # as load tests do when they end
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the lanes."""
    group = parser.getgroup("lanes")
    group.addoption("--until", type=float, help="begin no test after this moment, in seconds since 1970")
    group.addoption("--soak-hours", type=float, default=0.0, help="repeat interrupted trainings for so long")
    group.addoption("--soak-folder", help="keep the sums of the soak there, and go on from them")
    group.addoption("--rotate", type=int, help="begin with another file for another number")


def pytest_configure(config: pytest.Config) -> None:
    """Run Triton kernels in Triton's interpreter, but in the lane of GPUs. Triton asks when it is imported."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files; tests of a file keep their order."""
    number = config.getoption("--rotate")
    if number is None:
        items.sort(key=lambda item: _rank(item.nodeid))
    else:
        order = rotated({file_of(item.nodeid) for item in items}, number)
        items.sort(key=lambda item: order.index(file_of(item.nodeid)))


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def rotated(files: Iterable[str], number: int) -> list[str]:
    """Return all `files`, in the order of the day `number`.

    >>> rotated("abcdefgh", 0)[:3], rotated("abcdefgh", 1)[:3], rotated("abcdefgh", 2)[:3]
    (['a', 'b', 'c'], ['f', 'g', 'h'], ['c', 'd', 'e'])
    """
    ordered = sorted(files)
    first = number * FILES_A_DAY % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]


def _rank(nodeid: str) -> int:
    return next((i for i, start in enumerate(LONGEST_FIRST) if nodeid.startswith(start)), len(LONGEST_FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late, before any of its fixtures."""
    until_s = item.config.getoption("--until")
    if until_s is not None and time.time() > until_s:
        pytest.skip(NOT_REACHED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files with tests that were not reached."""
    skipped = terminalreporter.stats.get("skipped", [])
    late = [file_of(r.nodeid) for r in skipped if isinstance(r.longrepr, tuple) and NOT_REACHED in r.longrepr[2]]
    if late:
        terminalreporter.section("not reached before the deadline")
        for file in sorted(set(late)):
            terminalreporter.line(f"{late.count(file):4d} {file}")
