"""The default lane leaves out what no change touches: documents, scripts, engines of others, rules of the sources, and
tests marked `when_touched`.

A change is a difference from the last commit that the upstream branch shares with this checkout: upstream's own check
ran everything there. A file is untouched if nothing changed in all that it depends on (`tests/import_graph.py`).
Everything runs with `--all`, with `CI=true`, without an upstream branch, in other lanes, and where a command names
files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.import_graph import ImportGraph

DEFAULT_LANE = "not slow and not gpu"
WHEN_TOUCHED = (
    "docs",
    "README.md",
    "tests/benchmarks",
    "tests/docs",
    "tests/engines/launch",
    "tests/engines/maxtext",
    "tests/engines/megatron",
    "tests/engines/torchtitan",
    "tests/test_bundle.py",
    "tests/test_check.py",
    "tests/test_code_size.py",
    "tests/test_containers.py",
    "tests/test_rehearse_node.py",
    "tests/test_versions.py",
    "tests/test_words.py",
    "tests/unit/engines/maxtext",
    "tests/unit/engines/megatron",
    "tests/unit/engines/torchtitan",
)
"""All tests below these run when they are touched.

Documents and programs of other engines start processes for minutes, and few changes reach them. So it is with scripts.
What other engines import and export is text, the same on every machine, and the tests in `tests/unit/engines` itself go
through each engine.
"""
RULES = frozenset({"tests/test_code_size.py", "tests/test_project.py", "tests/test_words.py"})
"""Tests that read all sources: any change touches them. Without one they answer as they did upstream."""
MARK = "when_touched"
"""The mark of single tests: further members of a family of trainings, whose first member always runs."""
UNTOUCHED, BASE = pytest.StashKey[frozenset[str]](), pytest.StashKey[str]()


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
    for branch in ("origin/HEAD", "@{upstream}"):  # one's own branch, pushed, is checked by nobody
        if base := git(root, "merge-base", "HEAD", branch):
            return base
    return None


def changed_files(root: Path, base: str) -> frozenset[str]:
    """Return the files that differ from `base`, committed or not, new and deleted ones included."""
    listed = (
        git(root, "diff", "--name-only", "--no-renames", "-z", base),
        git(root, "ls-files", "--others", "--exclude-standard", "-z"),
    )
    return frozenset(name for text in listed if text for name in text.split("\0") if name)


FOR_ALL = frozenset(
    {"pyproject.toml", "conftest.py", "tests/changes.py", "tests/import_graph.py", "tests/lanes.py"}
    | {"tests/left_files.py", "tests/processor_time.py"}
)
"""Files that every test depends on."""


def touches_all(root: Path, changed: Iterable[str]) -> list[str]:
    """Return changes that may touch any test: of files for all, and deleted ones, which no graph of today knows."""
    return sorted(name for name in changed if name in FOR_ALL or not (root / name).exists())


def untouched(root: Path, files: Iterable[str], *, changed: frozenset[str]) -> frozenset[str]:
    """Return those of `files` that depend on nothing in `changed`."""
    if touches_all(root, changed):
        return frozenset()
    graph = ImportGraph(root)
    return frozenset(
        file for file in files if not changed or (file not in RULES and changed.isdisjoint(graph.distances(file)))
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("lanes").addoption(
        "--all", action="store_true", help="run documents, engines and marked tests that nothing touched, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the untouched files once, in the process that starts the others."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[UNTOUCHED] = frozenset(worker["untouched"])
        return
    config.stash[UNTOUCHED] = frozenset()
    base = upstream_base(config.rootpath) if _may_leave_out(config) else None
    if base is not None:
        config.stash[BASE] = base
        config.stash[UNTOUCHED] = untouched(
            config.rootpath, _candidates(config.rootpath), changed=changed_files(config.rootpath, base)
        )


def _may_leave_out(config: pytest.Config) -> bool:
    return (
        config.getoption("markexpr") == DEFAULT_LANE
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not config.getoption("--all")
        and os.environ.get("CI", "").lower() not in ("1", "true")
    )


def _candidates(root: Path) -> Iterator[str]:
    """Yield documents, tests in the folders above, and tests that hold the mark."""
    for path in (root / "README.md", *(root / "docs").rglob("*.md"), *(root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(WHEN_TOUCHED) or MARK in path.read_text(encoding="utf-8"):
            yield name


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the untouched files to a worker of pytest-xdist."""
    node.workerinput["untouched"] = sorted(node.config.stash[UNTOUCHED])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file before it is read."""
    if not config.stash[UNTOUCHED] or not collection_path.is_relative_to(config.rootpath):
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return (name.startswith(WHEN_TOUCHED) and name in config.stash[UNTOUCHED]) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the marked tests of untouched files, and README, which the configuration names to pytest."""
    untouched_files = config.stash[UNTOUCHED]
    left_out = [
        item
        for item in items
        if (name := item.nodeid.partition("::")[0]) in untouched_files
        and (item.get_closest_marker(MARK) or name.startswith(WHEN_TOUCHED))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to run it."""
    files = terminalreporter.config.stash[UNTOUCHED]
    if files:
        terminalreporter.line(
            f"Left out: documents, scripts, engines of others, rules of the sources and tests marked {MARK} in "
            f"{len(files)} files. Nothing that they "
            f"depend on changed since {terminalreporter.config.stash[BASE][:9]}, which upstream checked. "
            "--all runs them."
        )
