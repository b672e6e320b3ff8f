"""`meshwright export`: a run as the configuration of another engine, which need not be installed."""

from __future__ import annotations

from typing import Any

from meshwright.api.configurations import export
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, emit_text, note, print_line
from meshwright.cli.run_input import take_run


def run(*, asked: dict[str, Any], calibration: str | None, as_json: bool) -> None:
    """Write the configuration, and print its files and the command that starts them."""
    take_run(asked, calibration=calibration)
    done = ask(export, asked)
    if as_json:
        emit_json(done.to_dict())
        return
    print_line(done.summary(), style="bold")
    for row in done.to_rows():
        print_line(f"  {row['file']}")
    print_line()
    print_line("Start it on every host:")
    emit_text("".join(f"  {line}\n" for line in done.command.splitlines()))
    note(*done.notes)
