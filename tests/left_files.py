"""No test leaves a file in the checkout. Registered by the conftest.py of the repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = {".git", ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", "__pycache__"}
"""Folders in which tools keep what they remember."""
WRITTEN_BY_HAND = {".py", ".md", ".toml", ".swp"}
"""Suffixes of files that somebody may write while tests run."""
BEFORE, LEFT = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()


def files_of(root: Path) -> Iterator[str]:
    """Files below `root`, without environments and what tools keep."""
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in TOOLS and not name.endswith(".egg-info") and not Path(folder, name, "pyvenv.cfg").is_file()
        ]
        for name in names:
            if Path(name).suffix not in WRITTEN_BY_HAND:
                yield str(Path(folder, name).relative_to(root))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the files, in the process that starts the others."""
    if not _is_worker(session.config):
        session.config.stash[BEFORE] = set(files_of(session.config.rootpath))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if there are others."""
    if _is_worker(session.config):
        return
    left = set(files_of(session.config.rootpath)) - session.config.stash[BEFORE]
    session.config.stash[LEFT] = sorted(left)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name them."""
    if left := terminalreporter.config.stash.get(LEFT, []):
        terminalreporter.section("FAILED: files in the checkout that were not there before the tests")
        for name in left:
            terminalreporter.line(name)
