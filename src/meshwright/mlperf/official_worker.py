"""Process that runs the official checkers: JSON on stdin, JSON behind a record separator on stdout."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

_SEPARATOR = "\n" + "-" * 30 + "\n"


class _Messages(logging.Handler):
    """Keeps the checkers' messages."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def take(self, level: int) -> list[str]:
        found = [text for number, text in self.lines if number >= level]
        self.lines.clear()
        return found


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.read())
    messages = _Messages()
    root = logging.getLogger()
    root.addHandler(messages)
    root.setLevel(logging.INFO)
    answer = {"compliance": _compliance, "package": _package}[request["action"]](request, messages)
    sys.stdout.write("\n\x1e" + json.dumps(answer))


def _compliance(request: dict[str, Any], messages: _Messages) -> dict[str, Any]:
    from mlperf_logging.compliance_checker import mlp_compliance

    ruleset = request["ruleset"]
    config = request["config"] or f"training_{ruleset}/common.yaml"
    rows = []
    for file in request["files"]:
        mlp_compliance.enqueued_configs.clear()  # left over when the last file stopped the checker
        try:
            checker = mlp_compliance.make_checker("training", ruleset, False, False)
            passes = bool(mlp_compliance.main(file, config, checker)[0])
            found = [part for text in messages.take(logging.WARNING) for part in text.split(_SEPARATOR)]
        except Exception as error:  # the checker knows no such log: KeyError, TypeError, a missing rule file
            passes, found = False, [f"the checker stopped: {type(error).__name__}: {error}"]
            messages.take(logging.INFO)
        rows.append({"file": file, "passes": passes, "messages": [part.strip()[:2000] for part in found]})
    return {"files": rows}


def _package(request: dict[str, Any], messages: _Messages) -> dict[str, Any]:
    """Run the package checker; results of benchmarks that it skips by the checkers that it would have called."""
    from mlperf_logging.package_checker import package_checker

    with tempfile.TemporaryDirectory() as folder:
        try:
            package_checker.check_training_package(
                request["folder"], "training", request["ruleset"], False, False, False, False, False,
                str(Path(folder) / "package_checker.log"),
            )  # fmt: skip
        except Exception as error:  # a folder of another form, an unknown benchmark
            return {"passes": False, "messages": [f"the checker stopped: {type(error).__name__}: {error}"]}
    lines = list(messages.lines)
    messages.lines.clear()
    passes = any("FOUND NO ERRORS" in text for _, text in lines)
    found = [text.strip()[:2000] for level, text in lines if level >= logging.WARNING]
    for folder in sorted(Path(request["folder"]).glob("results/*/*")):
        if folder.name in request["own"]:
            problems = _own_results(folder, request["own"][folder.name], request["ruleset"], messages)
            passes = passes and not problems
            found += problems
    return {"passes": passes, "messages": found}


def _own_results(folder: Path, config: str | None, ruleset: str, messages: _Messages) -> list[str]:
    """Messages about result files of a benchmark of one's own, whose rule set is `config`."""
    from mlperf_logging.package_checker.seed_checker import SeedChecker

    files = sorted(str(path) for path in folder.glob("result_*.txt"))
    problems = []
    if config is not None:
        rows = _compliance({"files": files, "ruleset": ruleset, "config": config}, messages)["files"]
        problems = [f"{row['file']}: {text}" for row in rows if not row["passes"] for text in row["messages"]]
    if not SeedChecker(ruleset).check_seeds(files):
        problems += messages.take(logging.ERROR)
    return problems


if __name__ == "__main__":
    main()
