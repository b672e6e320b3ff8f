"""`meshwright train`: train the model of a run file on this machine, or as one process of a launcher."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import (
    calibration_option,
    calibration_override,
    json_option,
    run_argument,
    set_option,
    verb,
)
from meshwright.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from meshwright.engines.base import ProfileSteps, Start
    from meshwright.records.training import Record

RESULTS = Path("runs")


@verb(
    "train",
    examples=[
        "meshwright train examples/runs/tiny-llama-cpu.yaml",
        "meshwright train examples/runs/tiny-llama-cpu.yaml --set train.steps=20 --json",
        "meshwright train run.yaml --resume",
        "meshwright train run.yaml --profile",
        "meshwright train run.yaml --dry-run",
    ],
)
@run_argument()
@set_option
@calibration_option
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where results go.  [default: runs/NAME]",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N",
    help="How often to start again after a process was lost.  [default: 0]",
)  # fmt: skip
@click.option(
    "--profile", "profile", is_flag=True,
    help="Write a trace of three steps after the first five, and their time by kind of kernel.",
)  # fmt: skip
@click.option(
    "--profile-steps", "profile_steps", metavar="FIRST:LAST",
    help="Profile these steps instead, both ends included; the first step is 1.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=600.0, metavar="SECONDS",
    help="After which a step counts as hung: the processes write where they stand, and end.  [default: 600]",
)  # fmt: skip
@click.option(
    "--only-steps",
    is_flag=True,
    help="When the steps are taken write the record alone: no sample, adapter or page.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be trained, and where; train nothing.")
@json_option
def command(
    run_path: Path,
    overrides: tuple[str, ...],
    calibration: str | None,
    folder: Path | None,
    resume: bool,
    max_restarts: int,
    profile: bool,
    profile_steps: str | None,
    timeout_s: float,
    only_steps: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the model of a run file.

    Uses the accelerators of this machine, or its CPU where there are none. A plan of several processes starts them
    here; under torchrun each of its processes runs this command. Steps, the resolved run and the record are written
    to --out. SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and stop, --resume goes on from the newest one. SIGUSR2
    makes the processes write where they stand to DIR/stacks.
    """
    from meshwright import runfile

    started_s = time.time()
    run = runfile.load(run_path, overrides=[*calibration_override(calibration), *overrides])
    require_torch("training")

    from meshwright.cli.output import progress
    from meshwright.cli.train_words import show_plan, show_record
    from meshwright.engines.base import TrainOptions, find_engine

    engine = find_engine(run.engine)
    if folder is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the processes of a launcher need one folder for their results",
            hint="name it, for example --out runs/first",
        )
    folder = folder or default_folder(run.name, resume=resume)
    options = TrainOptions(
        folder=folder,
        resume=resume,
        command=("meshwright", *sys.argv[1:]),
        quiet=not _is_reporter(),
        max_restarts=max_restarts,
        timeout_s=timeout_s,
        started_s=started_s,
        only_steps=only_steps,
        profile=profile,
        profile_steps=_steps(profile_steps),
    )
    with progress("starting the engine"):  # seconds, the first time on a machine
        start = engine.prepare(run, options=options)
    if dry_run:
        show_plan(start, engine.expected(start), as_json=as_json)
        return
    if _is_reporter():
        _announce(start)
    with alone_in(folder, is_restart=_is_restart()) if _is_reporter() else nullcontext():
        engine.launch(start)
    record = engine.read(folder)
    if _is_reporter():
        page = None if only_steps else _write_page(folder)
        show_record(record, folder=folder, page=page, as_json=as_json)
    _leave(record, folder=folder)


def default_folder(name: str, *, resume: bool) -> Path:
    """runs/NAME; a new training takes the next free number, a resumed one the newest that is there."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "run"
    candidates = [RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, 10_000))]
    first_free = next(i for i, path in enumerate(candidates) if not path.exists())
    return candidates[max(0, first_free - 1) if resume else first_free]


def _write_page(folder: Path) -> Path | None:
    """Draw the report of the training in `folder`. A training that is done does not fail for want of a page."""
    from meshwright.cli.output import note, progress
    from meshwright.report.html import write_page
    from meshwright.report.training_page import training_page
    from meshwright.report.training_run import read_training

    path = folder / "report.html"
    try:
        with progress("drawing the report"):
            write_page(training_page(read_training(folder)), path=path)
    except InputError as error:
        note(f"there is no report: {error.message}")
        return None
    return path


def _steps(words: str | None) -> ProfileSteps | None:
    from meshwright.engines.base import ProfileSteps

    if words is None:
        return None
    first, _, last = words.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise InputError(
            "--profile-steps", got=words, allowed="FIRST:LAST, such as 10:13, the first step is 1"
        )
    return ProfileSteps(first=int(first), last=int(last))


def _announce(start: Start) -> None:
    from meshwright.cli.train_words import introduction

    for line in introduction(start):
        print(line, file=sys.stderr, flush=True)


def _is_reporter() -> bool:
    """Under a launcher only the first process answers."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def alone_in(folder: Path, *, is_restart: bool = False) -> Iterator[None]:
    """Refuse to train where another training writes: their steps and checkpoints would mix.

    A run that starts again goes on in any case: a network file system may hold a lost host's lock for minutes.
    """
    from meshwright.files import held

    with held(folder) as is_free:
        if not is_free and not is_restart:
            raise InputError(
                "another training writes there now", got=str(folder), hint="--out another folder"
            )
        yield


def _is_restart() -> bool:
    counts = (os.environ.get(name, "0") for name in ("MESHWRIGHT_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))
    return any(int(count) > 0 for count in counts)


def _leave(record: Record, *, folder: Path) -> None:
    from meshwright.records.training import Ending
    from meshwright.training.signals import STOPPED_EXIT_CODE

    if record.ending is Ending.STOPPED:
        raise click.exceptions.Exit(STOPPED_EXIT_CODE)
    if record.ending is Ending.DIVERGED:
        raise InfeasibleError(
            record.events[-1]["words"],
            hint=f"lower optimizer.learning_rate, lengthen warmup_steps, or see train.faults; "
            f"the steps are in {folder}",
        )
