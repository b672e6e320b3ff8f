"""The default lane leaves out documents and parity of engines that no change touches. Registered by conftest.py.

A change is a difference from the last commit that the upstream branch shares with this checkout: upstream's own check
ran everything there. A file is left out if nothing changed in all that it depends on (`tests/import_graph.py`). All
files run with `--all`, with `CI=true`, without an upstream branch, in other lanes, and where a command names them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.import_graph import ImportGraph

DEFAULT_LANE = "not slow and not gpu"
LEFT_OUT_FOLDERS = (
    "docs",
    "README.md",
    "tests/engines/maxtext",
    "tests/engines/megatron",
    "tests/engines/torchtitan",
)
"""Tests below these run processes for minutes, and few changes reach them."""
LEFT_OUT, BASE = pytest.StashKey[frozenset[str]](), pytest.StashKey[str]()


def git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def upstream_base(root: Path) -> str | None:
    """Return the last commit that HEAD shares with the upstream branch; None if there is none."""
    if (top := git(root, "rev-parse", "--show-toplevel")) is None or Path(top) != root.resolve():
        return None
    for branch in ("@{upstream}", "origin/HEAD"):
        if base := git(root, "merge-base", "HEAD", branch):
            return base
    return None


def changed_files(root: Path, base: str) -> frozenset[str]:
    """Return the files that differ from `base`, committed or not, new ones included."""
    listed = (
        git(root, "diff", "--name-only", "--no-renames", base),
        git(root, "ls-files", "--others", "--exclude-standard"),
    )
    return frozenset(name for text in listed if text for name in text.splitlines())


def untouched(root: Path, files: Iterable[str], *, changed: frozenset[str]) -> frozenset[str]:
    """Return those of `files` that depend on nothing in `changed`."""
    if "pyproject.toml" in changed:
        return frozenset()
    graph = ImportGraph(root)
    return frozenset(file for file in files if not changed or changed.isdisjoint(graph.distances(file)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("lanes").addoption(
        "--all", action="store_true", help="run documents and parity of engines even if nothing touched them"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Decide once, in the process that starts the others, what is left out."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[LEFT_OUT] = frozenset(worker["left_out"])
        return
    base = upstream_base(config.rootpath) if _may_leave_out(config) else None
    config.stash[LEFT_OUT] = frozenset()
    if base is not None:
        candidates = list(_candidates(config.rootpath))
        changed = changed_files(config.rootpath, base)
        config.stash[BASE] = base
        config.stash[LEFT_OUT] = untouched(config.rootpath, candidates, changed=changed)


def _may_leave_out(config: pytest.Config) -> bool:
    return (
        config.getoption("markexpr") == DEFAULT_LANE
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not config.getoption("--all")
        and os.environ.get("CI", "").lower() not in ("1", "true")
    )


def _candidates(root: Path) -> Iterable[str]:
    for name in LEFT_OUT_FOLDERS:
        path = root / name
        found = [path] if path.is_file() else [*path.rglob("*.md"), *path.rglob("test_*.py")]
        yield from (file.relative_to(root).as_posix() for file in found)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Hand the decision to a worker of pytest-xdist."""
    node.workerinput["left_out"] = sorted(node.config.stash[LEFT_OUT])  # type: ignore[attr-defined]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file before it is read."""
    if not config.stash[LEFT_OUT] or not collection_path.is_relative_to(config.rootpath):
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in config.stash[LEFT_OUT] or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to run it."""
    left_out = terminalreporter.config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.line(
            f"{len(left_out)} files (documents, parity of engines) were left out: nothing that they depend on changed "
            f"since {terminalreporter.config.stash[BASE][:9]}, which upstream checked. --all runs them."
        )
