"""`meshwright mlperf check`: check result files and print the findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.cli.output import emit_json, note, print_line, print_table, styled
from meshwright.errors import InputError
from meshwright.mlperf.check import CheckReport, check_path
from meshwright.mlperf.official import OfficialCheck, official_check
from meshwright.mlperf.score import result_folders

_SHOWN = 60
"""Findings printed of one set; --json has all."""


def run(
    *,
    paths: tuple[Path, ...],
    round_name: str | None,
    benchmark: str | None,
    folders: tuple[Path, ...],
    unfinished: bool,
    official: bool,
    as_json: bool,
) -> None:
    """Check every set and file, print, and exit with 1 if one is wrong."""
    wanted = list(dict.fromkeys(where for path in paths for where in _sets(path)))
    checked: list[tuple[CheckReport, OfficialCheck | None]] = []
    skipped: list[dict[str, str]] = []
    for where in wanted:
        try:
            report = check_path(
                where, round=round_name, benchmark=benchmark, folders=folders, unfinished=unfinished
            )
        except InputError as error:
            if len(wanted) == 1:
                raise
            skipped.append({"where": str(where), "reason": error.message})
            continue
        finished = [f for f in report.files if not (unfinished and f.name in report.pending)]
        checked.append(
            (report, official_check(finished, report.benchmark) if official and finished else None)
        )
    if not checked:
        raise InputError(f"none of {len(wanted)} sets could be checked; the first: {skipped[0]['reason']}")
    if as_json:
        documents = [check_document(report, verdict) for report, verdict in checked]
        emit_json(documents[0] if len(wanted) == 1 else {"sets": documents, "skipped": skipped})
    else:
        for report, verdict in checked:
            _print(report, verdict)
    for row in skipped:
        note(f"{row['where']} is not checked: {row['reason']}")
    if not all(passes(report, verdict) for report, verdict in checked):
        raise click.exceptions.Exit(1)


def passes(report: CheckReport, verdict: OfficialCheck | None) -> bool:
    """Return True if neither our rules nor the official checker reject anything."""
    return report.passes and (verdict is None or verdict.passes is not False)


def check_document(report: CheckReport, verdict: OfficialCheck | None) -> dict[str, Any]:
    """Return what --json prints of one set or file."""
    return {
        "where": str(report.where),
        "benchmark": report.benchmark.name,
        "round": report.benchmark.round,
        "round_from": report.round_from,
        "passes": passes(report, verdict),
        "num_errors": len(report.errors),
        "num_warnings": len(report.findings) - len(report.errors),
        "files": [path.name for path in report.files],
        "findings": [
            {
                "file": f.file, "line": f.line, "rule": f.rule, "severity": f.severity, "message": f.message,
                "why": f.why, "fix": f.fix,
            }
            for f in report.findings
        ],
        "pending": {name: list(keys) for name, keys in report.pending.items()},
        "official": None if verdict is None else _official_document(verdict),
    }  # fmt: skip


def _official_document(verdict: OfficialCheck) -> dict[str, Any]:
    return {
        "package": "mlperf-logging",
        "version": verdict.version,
        "ruleset": verdict.ruleset,
        "passes": verdict.passes,
        "not_run": verdict.not_run or None,
        "files": [
            {"file": v.file, "passes": v.passes, "messages": list(v.messages)} for v in verdict.verdicts
        ],
    }


def _sets(path: Path) -> Sequence[Path]:
    return [path] if path.is_file() else result_folders(path)


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
        print_line(f"{each.file}: {each.messages[0] if each.messages else 'no message'}"[:600])
