"""`meshwright bench train`: sweeps of run files, each configuration trained several times and compared with its
prediction."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from meshwright.bench.training import TrainingBenchRequest, now, train_all
from meshwright.bench.training_summary import Summary, contests, summaries, verdict
from meshwright.cli.bench_train_messages import Watch
from meshwright.cli.options import text_override
from meshwright.cli.output import emit_json, note, print_line, print_text_tables, progress, write_html
from meshwright.errors import InfeasibleError, InputError
from meshwright.records.sweep import Configuration, configurations, parse_sweep
from meshwright.records.trainings import TrainingRecorder
from meshwright.report.training_sweep import accuracy_sentence, outlier_sentences, tables
from meshwright.training.cpu_libraries import require_torch

LAUNCHER_HINT = "--launcher 'torchrun --nproc-per-node 2'"


def run(
    *,
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
    """Train every configuration, and summarize what was measured."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "this command starts the trainings itself: it does not run under a launcher", hint=LAUNCHER_HINT
        )
    asked = [*sweeps, *([] if engines is None else [f"engine={engines}"])]
    found = configurations(
        paths,
        sweeps=[parse_sweep(text) for text in asked],
        overrides=[*text_override("calibration", calibration), *overrides],
        steps=steps + warmup,
    )
    if all(configuration.engine == "native" for configuration in found):
        require_torch("training")  # of several engines, an absent one is a row with its reason
    request = TrainingBenchRequest(
        configurations=found, num_runs=num_runs, warmup=warmup, launcher=_command(launcher), timeout_s=timeout_s
    )
    recorder = TrainingRecorder(
        folder, configurations=found, steps=steps, warmup=warmup,
        command=("meshwright", *sys.argv[1:]), started=now(), resume=resume,
    )  # fmt: skip
    found_summaries = _train(request, recorder, found)
    if html_path is not None:
        with progress("drawing the page"):
            page = "meshwright.report.training_sweep:sweep_page"
            write_html(page, found_summaries, sidecar=recorder.sidecar, path=html_path)
    if as_json:
        _emit(found_summaries, recorder, html_path)
    else:
        _show(found_summaries, recorder, html_path)
    if not any(summary.is_measured for summary in found_summaries):
        raise InfeasibleError(
            "no configuration could be trained", hint=f"the last output of each is in {folder}/trainings"
        )


def _train(request: TrainingBenchRequest, recorder: TrainingRecorder, found: list[Configuration]) -> list[Summary]:
    """Train what the recorder lacks. Ctrl-C says how to continue."""
    watch = Watch(found, num_runs=request.num_runs, done=recorder.done)
    try:
        with watch:
            train_all(request, recorder=recorder, begin=watch.begin, done=watch.end)
    except KeyboardInterrupt:
        note(f"{len(recorder.done)} trainings are in {recorder.path}; continue with --resume")
        raise
    return summaries(recorder.rows, names=[configuration.name for configuration in found])


def _command(launcher: str | None) -> tuple[str, ...]:
    """The arguments of the launcher, or this Python."""
    if launcher is None:
        return (sys.executable,)
    try:
        arguments = tuple(shlex.split(launcher))
    except ValueError as error:
        raise InputError(f"--launcher is no command line ({error})", got=launcher) from None
    if not arguments:
        raise InputError("--launcher is empty", hint=LAUNCHER_HINT)
    return arguments


def _emit(found: list[Summary], recorder: TrainingRecorder, page: Path | None) -> None:
    emit_json(
        {
            "records": recorder.path,
            "device": recorder.sidecar["device"],
            "configurations": found,
            "engines": contests(found),
            "verdict": verdict(found),
            "page": page,
        }
    )


def _show(found: list[Summary], recorder: TrainingRecorder, page: Path | None) -> None:
    if recorder.sidecar["device"] is not None:
        print_line(recorder.sidecar["device"]["name"], style="bold")
        print_line()
    print_text_tables(tables(found))
    print_line()
    print_line(accuracy_sentence(verdict(found)))
    print_line(f"Records: {recorder.path}" + (f"; page: {page}" if page else ""))
    for caution in outlier_sentences(found):
        note(caution)
