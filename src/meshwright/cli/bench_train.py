"""`meshwright bench train`: sweeps of run files, each configuration trained several times, beside its prediction."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import (
    calibration_option,
    calibration_override,
    html_option,
    json_option,
    set_option,
    verb,
)
from meshwright.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from meshwright.bench.training_summary import Summary
    from meshwright.records.trainings import TrainingRecorder

DEFAULT_FOLDER = Path("bench-train")
LAUNCHER_HINT = "--launcher 'torchrun --nproc-per-node 2'"


@verb(
    "train",
    examples=[
        "meshwright bench train run.yaml",
        "meshwright bench train run.yaml --sweep batch.micro=1,2,4 --sweep precision=bf16,fp8",
        "meshwright bench train run.yaml --set parallel.data_shard=1 --sweep parallel.tensor=1,2 --html sweep.html",
        "meshwright bench train small.yaml large.yaml --runs 9 --steps 50 --warmup 10 --out bench/models",
        "meshwright bench train run.yaml --engines native,torchtitan,megatron,maxtext",
        "meshwright bench train run.yaml --resume",
        "meshwright bench train run.yaml --launcher 'torchrun --nnodes 2 --nproc-per-node 8'",
    ],
)
@click.argument("paths", metavar="RUN.yaml...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=V,V,...",
    help="Values of one key of the run file, as in --sweep batch.micro=1,2,4. May be repeated: all combinations.",
)  # fmt: skip
@click.option(
    "--engines", "engines", metavar="E,E,...",
    help="The same on several engines, beside each other: --sweep engine=E,E,...",
)  # fmt: skip
@set_option
@calibration_option
@click.option(
    "--runs", "num_runs", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N",
    help="How often each configuration is trained, every time in a process of its own.",
)  # fmt: skip
@click.option(
    "--steps", "steps", type=click.IntRange(1, 10**6), default=20, show_default=True, metavar="N",
    help="Steps of each training that count.",
)  # fmt: skip
@click.option(
    "--warmup", type=click.IntRange(0, 10**6), default=3, show_default=True, metavar="N",
    help="Steps before them that do not.",
)  # fmt: skip
@click.option(
    "--launcher", metavar="COMMAND",
    help="What starts `-m meshwright train`, instead of this Python alone: torchrun, srun ... python.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True,
    metavar="SECONDS", help="After which a training is ended.",
)  # fmt: skip
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_FOLDER,
    show_default=True, metavar="DIR", help="Where trainings.csv, trainings.json and each training's folder go.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with what is in --out: what was measured is kept.")
@html_option
@json_option
def command(
    paths: tuple[Path, ...],
    sweeps: tuple[str, ...],
    engines: str | None,
    overrides: tuple[str, ...],
    calibration: str | None,
    num_runs: int,
    steps: int,
    warmup: int,
    launcher: str | None,
    timeout_s: float,
    folder: Path,
    resume: bool,
    html_path: Path | None,
    as_json: bool,
) -> None:
    """Train every combination of run files and swept keys several times, and hold it against its prediction.

    Only the steps are taken: no checkpoints, validation, trackers or samples. Runs of the configurations take turns,
    so that a drift of the machine meets all. Each run is written at once: Ctrl-C keeps what was measured, --resume
    goes on. What runs out of memory, is refused or is killed is a line with its reason.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "this command starts the trainings itself, and is not started by a launcher", hint=LAUNCHER_HINT
        )
    from meshwright.bench.training import TrainingBenchRequest, now, train_all
    from meshwright.bench.training_summary import summaries
    from meshwright.records.sweep import configurations, parse_sweep
    from meshwright.records.trainings import TrainingRecorder

    asked = [*sweeps, *([] if engines is None else [f"engine={engines}"])]
    found = configurations(
        paths,
        sweeps=[parse_sweep(text) for text in asked],
        overrides=[*calibration_override(calibration), *overrides],
        steps=steps + warmup,
    )
    if all(
        configuration.engine == "native" for configuration in found
    ):  # of several, an absent one is a line
        require_torch("training")
    request = TrainingBenchRequest(
        configurations=found,
        num_runs=num_runs,
        warmup=warmup,
        launcher=_words(launcher),
        timeout_s=timeout_s,
    )
    recorder = TrainingRecorder(
        folder, configurations=found, steps=steps, warmup=warmup,
        command=("meshwright", *sys.argv[1:]), started=now(), resume=resume,
    )  # fmt: skip
    from meshwright.cli.bench_train_words import Watch

    watch = Watch(found, num_runs=num_runs, done=recorder.done)
    try:
        with watch:
            train_all(request, recorder=recorder, begin=watch.begin, tell=watch.tell)
    except KeyboardInterrupt:
        print(
            f"note: {len(recorder.done)} trainings are in {recorder.path}; go on with --resume",
            file=sys.stderr,
        )
        raise
    told = summaries(recorder.rows, names=[configuration.name for configuration in found])
    page = None if html_path is None else _write_page(told, recorder.sidecar, html_path)
    if as_json:
        _emit(told, recorder, page)
    else:
        _show(told, recorder, page)
    if not any(summary.is_measured for summary in told):
        raise InfeasibleError(
            "no configuration could be trained", hint=f"what each of them said last is in {folder}/trainings"
        )


def _words(launcher: str | None) -> tuple[str, ...]:
    if launcher is None:
        return (sys.executable,)
    try:
        words = tuple(shlex.split(launcher))
    except ValueError as error:
        raise InputError(f"--launcher is no command line ({error})", got=launcher) from None
    if not words:
        raise InputError("--launcher is empty", hint=LAUNCHER_HINT)
    return words


def _write_page(told: list[Summary], sidecar: dict[str, Any], path: Path) -> Path:
    from meshwright.cli.output import progress
    from meshwright.report.html import write_page
    from meshwright.report.training_sweep import sweep_page

    with progress("drawing the page"):
        write_page(sweep_page(told, sidecar=sidecar), path=path)
    return path


def _emit(told: list[Summary], recorder: TrainingRecorder, page: Path | None) -> None:
    from meshwright.bench.training_summary import contests, verdict
    from meshwright.cli.output import emit_json

    emit_json(
        {
            "records": recorder.path,
            "device": recorder.sidecar["device"],
            "configurations": told,
            "engines": contests(told),
            "verdict": verdict(told),
            "page": page,
        }
    )


def _show(told: list[Summary], recorder: TrainingRecorder, page: Path | None) -> None:
    from meshwright.bench.training_summary import verdict
    from meshwright.cli.output import note, print_line, print_text_tables
    from meshwright.report.training_sweep import accuracy_sentence, outlier_sentences, tables

    if recorder.sidecar["device"] is not None:
        print_line(recorder.sidecar["device"]["name"], style="bold")
        print_line()
    print_text_tables(tables(told))
    print_line()
    print_line(accuracy_sentence(verdict(told)))
    print_line(f"Records: {recorder.path}" + (f", for people: {page}" if page else ""))
    for words in outlier_sentences(told):
        note(words)
