"""`meshwright scale`: efficiency, time, failures, energy and cost as devices are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.answers.cluster import hardware_line
from meshwright.api.question import ask
from meshwright.api.scale import scale
from meshwright.cli.output import emit_json, note, print_line, print_text_tables, progress, write_page
from meshwright.cli.run_input import take_run
from meshwright.errors import InputError
from meshwright.report.scale import tables_of


def run(*, asked: dict[str, Any], calibration: str | None, html_path: Path | None, as_json: bool) -> None:
    """Study the scaling, and write the formats asked for."""
    if asked["tokens"] is not None and asked["days"] is not None:
        raise InputError("--tokens and --days both give the length of the training", hint="give one of them")
    run = take_run(asked, calibration=calibration)
    with progress(f"scaling {run.model.name}"):
        report = ask(scale, asked)
    note(*report.notes)
    write_page("meshwright.report.scale:scale_page", report, path=html_path)
    if as_json:
        emit_json(report.to_dict())
    else:
        if (line := hardware_line(report.study.request.cluster)) is not None:
            print_line(line)
        print_text_tables(tables_of(report))
