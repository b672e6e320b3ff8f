"""`meshwright scale`: efficiency, time, failures, energy and cost as devices are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.api.question import ask
from meshwright.api.scale import scale
from meshwright.cli.options import html_option, json_option
from meshwright.cli.output import emit_json, note, print_line, print_text_tables, progress, write_page
from meshwright.cli.question import key_options
from meshwright.cli.run_input import take_run
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.targets import load


@verb(
    "scale",
    question="meshwright.api.scale:scale",
    examples=[
        "meshwright scale examples/runs/moe-2t-mi355x.yaml --devices 8192,98304 --days 22.8",
        "meshwright scale examples/runs/moe-2t-mi300x.yaml --emulate 768 --devices 16384,32768,65536",
        "meshwright scale examples/runs/llama3.1-8b-pretrain.yaml --mode weak --html scale.html",
        "meshwright scale --model llama3.1-70b --cluster h100-8x16 --gbs 1024 --seq 8192 --tokens 1e12 --deadline 30",
        "meshwright scale --model moe-2t --cluster mi355x-8x1024 --gbs 32768 --seq 4096 --json",
    ],
)
@key_options("calibration")
@html_option
@json_option
def command(*, asked: dict[str, Any], calibration: str | None, html_path: Path | None, as_json: bool) -> None:
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
    write_page("meshwright.report.scale:scale_page", report, path=html_path)
    if as_json:
        emit_json(report.to_dict())
    else:
        if (line := load("meshwright.answers.cluster:hardware_line")(report.study.request.cluster)) is not None:
            print_line(line)
        print_text_tables(load("meshwright.report.scale:tables_of")(report))
