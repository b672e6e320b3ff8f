"""`meshwright scale`: efficiency, time, failures, energy and cost as devices are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.api.question import ask
from meshwright.api.scale import scale
from meshwright.cli.options import html_option
from meshwright.cli.output import emitted_json, note, print_hardware, print_text_tables, progress, write_page
from meshwright.cli.question import key_options
from meshwright.cli.run_input import take_run
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.targets import load


@verb("scale", question="meshwright.api.scale:scale")
@key_options("calibration")
@html_option
def command(*, asked: dict[str, Any], calibration: str | None, html_path: Path | None) -> None:
    """Scale a run to more devices: efficiency, time, failures, energy, cost.

    The run file's global batch is for the run file's cluster. The planner chooses a plan for each number
    of devices; with --keep-plan only the data-parallel degree of one plan grows. --emulate gives a small cluster the
    share of the batch that it would have in a large one, and says what such a test cannot show. --deadline finds the
    fewest devices that train in time.
    """
    if asked["tokens"] is not None and asked["days"] is not None:
        raise InputError("--tokens and --days both give the length of the training", hint="give one of them")
    run = take_run(asked, calibration=calibration)
    with progress(f"scaling {run.model.name}"):
        report = ask(scale, asked)
    note(*report.notes)
    write_page(report, html_path)
    if not emitted_json(report):
        print_hardware(report.study.request.cluster)
        print_text_tables(load("meshwright.report.scale:tables_of")(report))
