"""`meshwright import`: the configuration of another engine as a run file."""

from __future__ import annotations

from typing import Any

from meshwright.api.configurations import import_run
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Read the configuration, write or print the run file, and note what is wrong with the run."""
    found = ask(import_run, asked)
    if as_json:
        emit_json(found.to_dict())
        return
    if found.file is None:
        print(found.text, end="")
    for caution in found.notes:
        note(caution)
