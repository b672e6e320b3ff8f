"""`meshwright mlperf package`: build a submission and print what is in it."""

from __future__ import annotations

from typing import Any

import click

from meshwright.api.mlperf import mlperf_package
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.mlperf.package import SubmissionPackage


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Build, print, and exit with 1 if the submission is not valid."""
    package = ask(mlperf_package, asked)
    if as_json:
        emit_json(package.to_dict())
    else:
        _print(package)
    if not package.passes:
        raise click.exceptions.Exit(1)


def _print(package: SubmissionPackage) -> None:
    state = "written" if package.changed else "unchanged"
    print_line(f"{package.folder}: {state}, {len(package.files)} files", style="bold")
    rows = [
        (s.benchmark.name, len(s.scored), s.score_min and f"{s.score_min:.3f}", "passes" if s.passes else "no result")
        for s in package.scores
    ]
    print_table({"benchmark": "left", "runs": "right", "score min": "right", "result": "left"}, rows)
    for score in package.scores:
        if not score.passes:
            print_line(f"{score.benchmark.name}: {'; '.join(score.problems) or score.test.message}", style="red")
    for line in package.notes:
        note(line)
    check = package.check
    if check.not_run:
        print_line(f"official package checker: not run: {check.not_run}", style="yellow")
        return
    print_line(f"official package checker: {'no errors' if check.passes else 'found errors'}")
    for line in check.not_checked:
        print_line(f"not checked officially: {line}")
    for message in check.messages if not check.passes else ():
        print_line(message)
