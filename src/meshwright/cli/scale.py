"""`meshwright scale`: efficiency, time, failures, energy and cost as devices are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.answers.cluster import hardware_line
from meshwright.answers.scale_study import ScaleQuestion, scale_report
from meshwright.cli.output import emit_json, note, print_line, print_text_tables, progress, write_html
from meshwright.cli.report_options import typed
from meshwright.cli.run_input import run_from
from meshwright.errors import InputError
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.scaling import Mode
from meshwright.report.scale_tables import tables_of


def run(
    *,
    run_path: Path | None,
    overrides: tuple[str, ...],
    fixes: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    mode: str,
    keep_plan: bool,
    small: int | None,
    replicas: tuple[int, ...] | None,
    with_sensitivity: bool,
    num_tokens: float | None,
    days: float | None,
    with_failures: bool,
    html_path: Path | None,
    as_json: bool,
    **run_options: Any,
) -> None:
    """Study the scaling, and write the formats asked for. `run_options`: options that replace keys of the run file."""
    if num_tokens is not None and days is not None:
        raise InputError("--tokens and --days both give the length of the training", hint="give one of them")
    run = run_from(run_path, overrides=overrides, **run_options)
    question = ScaleQuestion(
        mode=Mode(mode),
        fixed=fixed_fields(fixes),
        sizes=sizes or (),
        keep_plan=keep_plan,
        small=small,
        replicas=replicas or (),
        with_sensitivity=with_sensitivity,
        num_tokens=num_tokens,
        days=days,
        with_failures=with_failures,
    )
    with progress(f"scaling {run.model.name}"):
        report = scale_report(run, question)
    if report.engine_note:
        note(report.engine_note)
    if html_path is not None:
        write_html("meshwright.report.scale_page:scale_page", report, path=html_path, command=typed())
        note(f"wrote {html_path}")
    if as_json:
        emit_json(report.to_dict())
    else:
        if (line := hardware_line(report.study.request.cluster)) is not None:
            print_line(line)
        print_text_tables(tables_of(report))
