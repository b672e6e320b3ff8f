"""Documents that run: every code block of README.md and docs/ is an example that pytest executes.

    ```python    is evaluated; `>>>` lines are compared as doctests
    ```bash      is run by bash and must exit with 0
    ```console   `$ command` lines are run and their output compared with what follows; `...` is anything

A block that must not run has `<!--- skip: next "the reason" -->` in front of it. Commands run in a temporary
folder that sees the repository's `examples`; the blocks of one document share it, in order.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.warm_shell import WarmShell

if TYPE_CHECKING:
    from sybil import Example

# Two test processes and the ranks that they start share the cores: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The commands and ranks that tests start are hundreds: without compiled files each would compile all sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A stranger runs `.venv/bin/python -m ...` without activating it: scripts of the environment are not on PATH.
if sys.prefix != sys.base_prefix:
    _folders = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(
        folder for folder in _folders if Path(folder).resolve() != Path(sys.prefix, "bin").resolve()
    )

pytest_plugins = ["tests.lanes", "tests.left_files", "tests.processor_time", "tests.changes"]
ROOT = Path(__file__).parent
collect_ignore_glob = [
    "src/meshwright/engines/*/in_*",  # code for the processes of other programs
    "tests/engines/megatron/shim/*",  # acts when it is imported
    "tests/engines/torchtitan/hopper/*",  # acts when it is imported
    "tests/engines/torchtitan/shim/*",  # so does this
]
if importlib.util.find_spec("torch") is None:
    collect_ignore_glob += [  # doctests of the doing half import torch
        "src/meshwright/engines/native/*",
        "src/meshwright/kernels/*",
        "src/meshwright/training/*",
        "src/meshwright/bench/ingest/*",
        "src/meshwright/bench/steps.py",
    ]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no source that has no doctest; `tests/test_project.py` imports all of them, in one process."""
    is_source = collection_path.suffix == ".py" and collection_path.is_relative_to(ROOT / "src")
    return (is_source and ">>>" not in collection_path.read_text(encoding="utf-8")) or None


@pytest.fixture(autouse=True, scope="session")
def _published_runs_are_read_once() -> Iterator[None]:
    """A process keeps the rows of two files, and tests read hundreds of small ones between those that read our own."""
    from meshwright.accuracy import rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_known_runs", cache(rows._known_runs.__wrapped__))
        yield


COMPARISON = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ENVIRONMENT_SETUP = re.compile(r"python3 -m venv \S+ && \S+/pip install [^&\n]+ && \.venv/bin/")
"""Set-up that a README command needs on a fresh machine; the tests already run inside such an environment."""


@cache
def _shell() -> WarmShell:
    return WarmShell()


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = [str(_shell().folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(path), "COLUMNS": "110", "NO_COLOR": "1"}
    environment.pop("TRITON_INTERPRET", None)  # of these tests, and of no reader
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", ENVIRONMENT_SETUP.sub("", command)],
        cwd=folder, env=environment, text=True, timeout=300,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _evaluate_bash(example: Example) -> str | None:
    done = _run(example.parsed, example.namespace["folder"])
    return f"exit code {done.returncode}\n{done.stdout}" if done.returncode else None


def _evaluate_console(example: Example) -> str | None:
    for block in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
        command, expected = _split_at_output(block)
        printed = _run(command, example.namespace["folder"]).stdout
        if not doctest.OutputChecker().check_output(expected, printed, COMPARISON):
            return f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}"
    return None


def _split_at_output(block: str) -> tuple[str, str]:
    """The command, which goes on after a backslash at the end of a line, and the output that follows it."""
    lines = block.splitlines(keepends=True)
    num_command_lines = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\\n"))
    return "".join(lines[:num_command_lines]), "".join(lines[num_command_lines:])


def _open_folder(namespace: dict[str, Any]) -> None:
    namespace["_temporary"] = temporary = tempfile.TemporaryDirectory()
    namespace["folder"] = folder = Path(temporary.name)
    if (ROOT / "examples").is_dir():
        (folder / "examples").symlink_to(ROOT / "examples")


def _close_folder(namespace: dict[str, Any]) -> None:
    namespace["_temporary"].cleanup()


if importlib.util.find_spec("sybil") is None:

    def pytest_report_header() -> str:
        return "documents are not executed: Sybil is not installed"

else:
    from sybil import Sybil
    from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

    pytest_collect_file = Sybil(
        parsers=[
            SkipParser(),
            PythonCodeBlockParser(doctest_optionflags=COMPARISON),
            CodeBlockParser(language="bash", evaluator=_evaluate_bash),
            CodeBlockParser(language="console", evaluator=_evaluate_console),
        ],
        patterns=["*.md"],
        setup=_open_folder,
        teardown=_close_folder,
    ).pytest()
