"""`meshwright bench train`: sweeps of run files, each configuration trained several times and compared with its
prediction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.api.bench import bench_train, sweep_request
from meshwright.api.question import question_of
from meshwright.bench.training import TrainingBenchRequest, train_all
from meshwright.bench.training_summary import Summary, contests, summaries, verdict
from meshwright.cli.output import emit_json, note, print_line, print_text_tables, progress, say, wants_json, write_html
from meshwright.errors import InfeasibleError, printable
from meshwright.records.sweep import Configuration
from meshwright.records.trainings import TrainingRecorder, TrainingRow, TrainingStatus
from meshwright.report.training_sweep import accuracy_sentence, outlier_sentences, tables
from meshwright.targets import load


def run(*, asked: dict[str, Any], html_path: Path | None) -> None:
    """Train every configuration and summarize the measurements."""
    given = question_of(bench_train).checked(asked)
    request, recorder = sweep_request(**given, command=("meshwright", *sys.argv[1:]))
    found_summaries = _train(request, recorder)
    if html_path is not None:
        with progress("drawing the page"):
            page = "meshwright.report.training_sweep:sweep_page"
            write_html(page, found_summaries, sidecar=recorder.sidecar, path=html_path)
    if wants_json():
        _emit(found_summaries, recorder, html_path)
    else:
        _show(found_summaries, recorder, html_path)
    if not any(summary.is_measured for summary in found_summaries):
        raise InfeasibleError(
            "no configuration could be trained", hint=f"the last output of each is in {recorder.folder}/trainings"
        )


def _train(request: TrainingBenchRequest, recorder: TrainingRecorder) -> list[Summary]:
    """Train the configurations that have no record yet. Ctrl-C prints the command that continues."""
    found = request.configurations
    watch = Watch(found, num_runs=request.num_runs, done=recorder.done)
    try:
        with watch:
            train_all(request, recorder=recorder, begin=watch.begin, done=watch.end)
    except KeyboardInterrupt:
        note(f"{len(recorder.done)} trainings are in {recorder.path}; continue with --resume")
        raise
    return summaries(recorder.rows, names=[configuration.name for configuration in found])


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
    note(*outlier_sentences(found))


class Watch:
    """Show the current training and the results of the finished ones on stderr."""

    def __init__(self, found: Sequence[Configuration], *, num_runs: int, done: set[tuple[str, int]]) -> None:
        self.num_runs, self.width = num_runs, max(len(c.name) for c in found)
        asked = {(c.name, run) for c in found for run in range(1, num_runs + 1)}
        self.total, self.num_done = len(asked), len(asked & done)
        self.bar: Any = None
        for configuration in found:
            if configuration.refusal:
                note(f"{configuration.name}: {configuration.refusal}")
        if self.num_done:
            note(f"{self.num_done} of {self.total} runs were measured before")

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            self.bar = load("meshwright.cli.bars:counted_bar")(stream=sys.stderr)
            self.task = self.bar.add_task("", total=self.total, completed=self.num_done)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, configuration: Configuration, run: int) -> None:
        """Show that a training starts."""
        if self.bar is not None:
            self.bar.update(self.task, description=f"{configuration.name}, run {run} of {self.num_runs}")

    def end(self, row: TrainingRow) -> None:
        """Show the result of a training."""
        self.num_done += 1
        line = f"{row.configuration:<{self.width}}  run {row.run}  {_outcome(row)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.num_done)
            self.bar.console.print(printable(line))
        else:
            say(line)


def _outcome(row: TrainingRow) -> str:
    """The measured rate and its prediction, or the reason for none."""
    if row.status is not TrainingStatus.OK:
        return f"{row.status.replace('_', ' ')}: {row.reason}"
    measured = row.tokens_per_s_per_device or 0.0
    text = f"{rate(measured)} tokens/s/device"
    if row.error is None:
        return text
    return f"{text}, predicted {rate(measured / (1 + row.error))} ({100 * row.error:+z.1f} %)"
