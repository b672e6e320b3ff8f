"""`meshwright export`: a run as the configuration of another engine, which need not be installed."""

from __future__ import annotations

from typing import Any

from meshwright.api.configurations import export
from meshwright.api.question import ask
from meshwright.cli.output import emit_text, emitted_json, note, print_line
from meshwright.cli.question import key_options
from meshwright.cli.run_input import take_run
from meshwright.cli.verbs import verb


@verb("export", question="meshwright.api.configurations:export")
@key_options("calibration")
def command(*, asked: dict[str, Any], calibration: str | None) -> None:
    """Write a run as the configuration of another engine.

    The engine need not be installed. A run that it cannot express is refused, with the reason. With `parallel: auto`
    the planner's best plan for the run's cluster is written. The files are complete: the printed command starts them.
    """
    take_run(asked, calibration=calibration)
    done = ask(export, asked)
    if emitted_json(done):
        return
    print_line(done.summary(), style="bold")
    for row in done.to_rows():
        print_line(f"  {row['file']}")
    print_line()
    print_line("Start it on every host:")
    emit_text("".join(f"  {line}\n" for line in done.command.splitlines()))
    note(*done.notes)
