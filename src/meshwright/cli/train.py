"""`meshwright train`: train the model of a run file on this machine, or as one process of a launcher."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from meshwright.api.question import question_of
from meshwright.api.runs import load_run
from meshwright.api.train import take_training, train, train_options
from meshwright.cli.options import text_override
from meshwright.cli.output import note, progress, say, write_html
from meshwright.cli.train_messages import introduction, show_plan, show_record
from meshwright.engines.base import Start, TrainingEngine
from meshwright.errors import InfeasibleError, InputError
from meshwright.records.training import Ending, Record
from meshwright.specs.run import Run
from meshwright.targets import load
from meshwright.training.profiling.steps import ProfileSteps
from meshwright.training.signals import STOPPED_EXIT_CODE


def run(
    *,
    asked: dict[str, Any],
    calibration: str | None,
    profile: bool,
    profile_steps: str | None,
    only_steps: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Prepare the engine, train, and report. Under a launcher only the first process reports."""
    started_s, given = time.time(), question_of(train).checked(asked)
    overrides = [*text_override("calibration", calibration), *given.pop("overrides")]
    run, force, branch = load_run(given.pop("run"), overrides=overrides), given.pop("force"), given["branch"]
    is_reporter = os.environ.get("RANK", "0") == "0"
    options = train_options(
        run,
        command=("meshwright", *sys.argv[1:]),
        quiet=not is_reporter,
        started_s=started_s,
        only_steps=only_steps,
        profile=profile,
        profile_steps=_profile_steps(profile_steps),
        **given,
    )
    if branch and dry_run:
        raise InputError("--branch writes the weights that the new run starts from, --dry-run writes nothing")

    def prepare(engine: TrainingEngine, begun: Run) -> Start | None:
        with progress("starting the engine"):  # seconds, the first time on a machine
            start = engine.prepare(begun, options=options)
        if dry_run:
            show_plan(start, engine.expected(start), as_json=as_json)
            return None
        if is_reporter:
            for line in (*(f"note: {text}" for text in start.notes if branch), *introduction(start)):
                say(line)
        return start

    record = take_training(
        run, options, branch=branch, force=force, prepare=prepare, is_dry=dry_run, is_first=is_reporter
    )
    if record is None:
        return
    if is_reporter:
        page = None if only_steps else _write_page(options.folder)
        show_record(record, folder=options.folder, page=page, as_json=as_json)
    _leave(record, folder=options.folder)


def _profile_steps(text: str | None) -> ProfileSteps | None:
    if text is None:
        return None
    try:
        return ProfileSteps.parse(text)
    except ValueError:
        raise InputError(
            "--profile-steps", got=text, allowed="FIRST:LAST, such as 10:13, the first step is 1"
        ) from None


def _write_page(folder: Path) -> Path | None:
    """Draw the report of the training in `folder`. A finished training does not fail because of its report."""
    path = folder / "report.html"
    try:
        with progress("drawing the report"):
            training = load("meshwright.answers.training_run:read_training")(folder)
            write_html("meshwright.report.training_page:training_page", training, path=path)
    except InputError as error:
        note(f"there is no report: {error.message}")
        return None
    return path


def _leave(record: Record, *, folder: Path) -> None:
    """Exit with the code of a training that was stopped or diverged."""
    if record.ending is Ending.STOPPED:
        raise click.exceptions.Exit(STOPPED_EXIT_CODE)
    if record.ending is Ending.DIVERGED:
        raise InfeasibleError(
            record.events[-1]["words"],
            hint=f"lower optimizer.learning_rate, lengthen warmup_steps, or see train.faults; "
            f"the steps are in {folder}",
        )
