"""`meshwright mlperf check`: check result files and print the findings."""

from __future__ import annotations

from typing import Any

import click

from meshwright.api.mlperf import mlperf_check
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_table, styled
from meshwright.mlperf.check import CheckReport
from meshwright.mlperf.official import OfficialCheck

_SHOWN = 60
"""Findings printed of one set; --json has all."""


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Check every set and file, print, and exit with 1 if one is wrong."""
    found = ask(mlperf_check, asked)
    if as_json:
        emit_json(found.to_dict())
    else:
        for checked in found.sets:
            _print(checked.report, checked.official)
    for row in found.skipped:
        note(f"{row.where} is not checked: {row.reason}")
    if not found.passes:
        raise click.exceptions.Exit(1)


def _print(report: CheckReport, verdict: OfficialCheck | None) -> None:
    rules = report.benchmark
    print_line(f"{report.where}: {rules.name}, round {rules.round} ({report.round_from})", style="bold")
    rows = [
        (
            f.file if f.line is None else f"{f.file}:{f.line}",
            styled(f.rule, "red" if f.severity == "error" else "yellow"),
            f.message,
        )
        for f in report.findings[:_SHOWN]
    ]
    if rows:
        print_table({"where": "left", "rule": "left", "found": "left"}, rows)
    if len(report.findings) > _SHOWN:
        print_line(f"and {len(report.findings) - _SHOWN} more; --json prints all")
    for finding in {f.rule: f for f in report.findings}.values():
        print_line(f"{finding.rule} ({finding.severity}): {finding.why}. Mend: {finding.fix}.")
    for name, keys in report.pending.items():
        print_line(f"{name} is not finished; still to come: {', '.join(keys) or 'nothing that is required'}")
    warnings = len(report.findings) - len(report.errors)
    print_line(f"{len(report.files)} files: {len(report.errors)} errors, {warnings} warnings")
    if verdict is not None:
        _print_official(verdict)
    print_line()


def _print_official(verdict: OfficialCheck) -> None:
    if verdict.not_run:
        print_line(f"official compliance checker: not run: {verdict.not_run}", style="yellow")
        return
    failed = [v for v in verdict.verdicts if not v.passes]
    outcome = "passes" if not failed else f"rejects {len(failed)} of {len(verdict.verdicts)} files"
    print_line(f"official compliance checker {verdict.version}, rule set {verdict.ruleset}: {outcome}")
    for each in failed:
        print_line(f"{each.file}: {each.messages[0] if each.messages else 'no message'}")
