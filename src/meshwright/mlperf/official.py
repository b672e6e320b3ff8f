"""Official checkers of the package `mlperf-logging`, in a process of their own.

They print, keep state in module globals, stop with tracebacks on odd logs, and write scaling.json into the tree that
they check. Here they run on copies, and their messages are read instead of their exit codes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright.json_values import parse_json
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.programs import install_command

PACKAGE = "mlperf-logging"
_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class OfficialVerdict:
    """Result of the official compliance checker for one file."""

    file: str
    passes: bool
    messages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OfficialCheck:
    """Results of the official compliance checker; `not_run` says why there are none."""

    ruleset: str
    version: str | None
    verdicts: tuple[OfficialVerdict, ...] = ()
    not_run: str = ""

    @property
    def passes(self) -> bool | None:
        """Return True if the checker accepts every file; None where it did not run."""
        return None if self.not_run else all(v.passes for v in self.verdicts)


def package_version() -> str | None:
    """Version of mlperf-logging; None if it is not installed."""
    if importlib.util.find_spec("mlperf_logging") is None:
        return None
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def official_check(files: Sequence[Path], rules: Benchmark) -> OfficialCheck:
    """Run the official compliance checker on result files."""
    ruleset = str(rules.ruleset_file) if rules.ruleset_file else rules.rules.ruleset
    installed = package_version()
    not_run = ""
    if installed is None:
        not_run = f"{PACKAGE} is not installed: {install_command('mlperf')}"
    elif not rules.official and rules.ruleset_file is None:
        not_run = f"{rules.name} has no rule set for the official checker"
    if not_run:
        return OfficialCheck(ruleset=ruleset, version=installed, not_run=not_run)
    config = str(rules.ruleset_file.absolute()) if rules.ruleset_file else None
    request = {
        "action": "compliance", "files": [str(f.absolute()) for f in files],
        "ruleset": rules.rules.ruleset, "config": config,
    }  # fmt: skip
    answer = ask(request)
    if "error" in answer:
        return OfficialCheck(ruleset=ruleset, version=installed, not_run=answer["error"])
    verdicts = tuple(
        OfficialVerdict(file=Path(row["file"]).name, passes=row["passes"], messages=tuple(row["messages"]))
        for row in answer["files"]
    )
    return OfficialCheck(ruleset=ruleset, version=installed, verdicts=verdicts)


def ask(request: dict[str, object]) -> dict:
    """Send a request to a process that runs the checkers; its answer, or {"error": ...}."""
    command = [sys.executable, "-m", "meshwright.mlperf.official_worker"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the official checker did not end within {_TIMEOUT_S} s"}
    last = done.stdout.rpartition("\n\x1e")[2]
    try:
        return parse_json(last)
    except ValueError:
        return {"error": f"the official checker ended with {done.returncode}: {done.stderr.strip()[-400:]}"}
