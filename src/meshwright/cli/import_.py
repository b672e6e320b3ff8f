"""`meshwright import`: the configuration of another engine as a run file."""

from __future__ import annotations

from typing import Any

from meshwright.api.configurations import import_run, survey_configurations
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, emit_text, note, print_line, print_text_tables
from meshwright.errors import InputError

OF_SURVEYS = ("cluster", "ignore")


def run(*, asked: dict[str, Any], survey: bool, as_json: bool) -> None:
    """Read the configuration, write or print the run file, and note what is wrong with the run."""
    if survey:
        _survey(asked, as_json=as_json)
        return
    if asked["cluster"] is None:
        raise InputError("missing option '--cluster'", hint="see `meshwright import --help`")
    found = ask(import_run, asked)
    if as_json:
        emit_json(found.to_dict())
        return
    if found.file is None:
        emit_text(found.text)
    note(*found.notes)


def _survey(asked: dict[str, Any], *, as_json: bool) -> None:
    """Print what `import` reads of every configuration below a folder."""
    folder, given = asked.pop("source"), {key: asked.pop(key) for key in OF_SURVEYS}
    if others := [f"--{'out' if key == 'file' else key.replace('_', '-')}" for key, value in asked.items() if value]:
        raise InputError("--survey does not go with", got=", ".join(others), allowed="--cluster, --ignore, --json")
    found = ask(survey_configurations, {"folder": folder, **given})
    if as_json:
        emit_json(found.to_dict())
        return
    if found.files:
        print_text_tables(found.tables())
        print_line()
    print_line(found.summary())
