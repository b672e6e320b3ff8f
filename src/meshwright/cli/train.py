"""`meshwright train`: train the model of a run file on this machine, or as one process of a launcher."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.api.question import question_of
from meshwright.api.runs import calibrating, load_run
from meshwright.api.train import take_training, train, train_options
from meshwright.cli import output
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.base import Start, StartPrediction, TrainingEngine
from meshwright.errors import InfeasibleError, InputError
from meshwright.records.training import Ending, Record, predicted_text
from meshwright.specs.run import Run
from meshwright.targets import load
from meshwright.training.profiling.steps import ProfileSteps
from meshwright.training.signals import STOPPED_EXIT_CODE
from meshwright.units import format_bytes, format_count, format_duration, format_seconds

if TYPE_CHECKING:
    from meshwright.training.data import Corpus


def run(
    *,
    asked: dict[str, Any],
    calibration: str | None,
    profile: bool,
    profile_steps: str | None,
    only_steps: bool,
    dry_run: bool,
    html_path: Path | None,
) -> None:
    """Prepare the engine, train, and report. Under a launcher only the first process reports."""
    started_s, given = time.time(), question_of(train).checked(asked)
    overrides = [*calibrating(calibration), *given.pop("overrides")]
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
    if html_path is not None and (not dry_run or run.data.is_synthetic):
        raise InputError(
            "--html is the page of the data of a dry run", got="random tokens" if dry_run else "a training",
            allowed="--dry-run with data.source", hint="a training writes report.html to its folder",
        )  # fmt: skip

    def prepare(engine: TrainingEngine, begun: Run) -> Start | None:
        with output.progress("starting the engine"):  # seconds, the first time on a machine
            start = engine.prepare(begun, options=options)
        if dry_run:
            data = None
            if html_path is not None:
                with output.progress("reading the data"):
                    data = load("meshwright.training.data.corpus:open_data")(start.run)
                about = {"name": start.run.name, "sequence_length": start.run.sequence_length}
                output.write_html("meshwright.report.data_page:data_page", data.usages, path=html_path, **about)
            show_plan(start, engine.expected(start), data=data)
            return None
        if is_reporter:
            for line in (*(f"note: {text}" for text in start.notes if branch), *introduction(start)):
                output.say(line)
        return start

    record = take_training(
        run, options, branch=branch, force=force, prepare=prepare, is_dry=dry_run, is_first=is_reporter
    )
    if record is None:
        return
    if is_reporter:
        page = None if only_steps else _write_page(options.folder)
        show_record(record, folder=options.folder, page=page)
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
        with output.progress("drawing the report"):
            training = load("meshwright.answers.training_run:read_training")(folder)
            output.write_html("meshwright.report.training_page:training_page", training, path=path)
    except InputError as error:
        output.note(f"there is no report: {error.message}")
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


# --- messages ---


def introduction(start: Start) -> list[str]:
    """Lines with the model, the devices, the number of steps and the folder of a training that starts."""
    run, plan = start.run, start.plan
    parameters = float(count_parameters(model_row(run.model)).total)
    lines = [
        f"{run.name}: {run.model.name}, {format_count(parameters)} parameters, {run.precision.name}; "
        f"{plan.describe()} on {plan.num_devices} x {start.device_name}",
        f"{run.num_steps:,} steps of {' '.join(_size_of_a_step(run))}; results: {start.options.folder}",
    ]
    if plan.num_devices > 1 and "RANK" not in os.environ:  # no launcher has started them
        virtual = f"one process with {plan.num_devices} virtual devices"
        processes = virtual if start.num_processes == 1 else f"{start.num_processes} processes"
        lines.append(f"starting {processes} ...")
    return lines


def _size_of_a_step(run: Run) -> tuple[str, str]:
    """Number and unit."""
    if run.label_tokens is None:
        return f"{run.tokens_per_step:,}", "tokens"
    return f"at least {run.label_tokens:,}", "labels"


def show_plan(start: Start, expected: StartPrediction, *, data: Corpus | None) -> None:
    """Print the plan, the prediction and the data, if it was read, of a dry run."""
    notes = (*start.notes, *expected.notes, *(() if data is None else data.notes))
    if output.wants_json():
        document = {
            "plan": start.plan, "num_steps": start.run.num_steps, "predicted": expected.predicted,
            "folder": start.options.folder, "data": data and data.usage, "notes": notes,
        }  # fmt: skip
        output.emit_json(document)
        return
    output.print_line(f"{start.run.name}: {start.run.model.name}, {start.plan.describe()}", style="bold")
    number, unit = _size_of_a_step(start.run)
    rows = [
        ("processes", start.num_processes),
        ("steps", f"{start.run.num_steps:,}"),
        (f"{unit} per step", number),
        ("results", start.options.folder),
    ]
    if expected.predicted is not None:
        rows.append(("expected step", predicted_text(expected.predicted, "step")))
    output.print_table({"": "left", " ": "left"}, rows)
    if data is not None:
        output.print_line()
        output.print_text_tables([load("meshwright.report.data_page:data_table")(data.usages)])
    output.note(*notes)


def show_record(record: Record, *, folder: Path, page: Path | None) -> None:
    """Print measured and predicted quantities of a training, side by side."""
    if output.emitted_json(record):
        return
    s = record.statistics
    output.print_line(
        f"{record.run['name']}: {record.run['model']['name']}, {record.run['plan_in_words']}", style="bold"
    )
    output.print_table({"": "left", "measured": "right", "predicted (80 % interval)": "right"}, _rows(record))
    output.print_line(f"MFU: {s['mfu_convention']}.")
    output.print_line(f"Wall time: {_phases(record.time_s)}.")
    if record.profile:
        output.print_line()
        output.print_table({"profiled steps": "left", "share": "right", "a step": "right"}, _shares(record.profile))
    if record.sample:
        output.print_line()
        output.print_line("The model writes:", style="bold")
        output.print_line(record.sample)
    output.print_line()
    output.print_line(f"Results: {folder}" + (f"; report: {page}" if page else ""))
    output.note(*record.notes)


def _rows_of_sources(sources: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """Shares and epochs of the sources of a mixture."""
    return [
        (f"data, {name}", f"{100 * s['share']:.1f} % of samples, {s['num_epochs']:.2f} epochs", "")
        for name, s in sources.items()
        if len(sources) > 1
    ]


def _rows(record: Record) -> list[tuple[str, str, str]]:
    s, predicted = record.statistics, record.predicted or {}

    def expected(name: str) -> str:
        return predicted_text(predicted, name) if name in predicted else "not predicted"

    rows = [("steps", f"{s['steps']:,}", ""), ("tokens", f"{s['tokens']:,}", "")]
    if s["first_loss"] is not None:
        rows.append(("loss, first to last step", f"{s['first_loss']:.3f} to {s['last_loss']:.3f}", ""))
    if s["validation_loss"] is not None:
        rows.append(("validation loss", f"{s['validation_loss']:.3f}", ""))
    rows += [
        (f"validation loss, {name}", f"{loss:.3f}", "") for name, loss in (s.get("validation_losses") or {}).items()
    ]
    rows += _rows_of_sources(s.get("data_progress") or {})
    if target := s["target"]:
        when = f"step {target['steps']:,}, {format_seconds(target['seconds'])}"
        rows.append((f"loss {target['loss']:g} reached", when, ""))
    if s["step_s"]["n"]:
        rows += [
            ("step, median", format_seconds(s["step_s"]["median"]), expected("step")),
            ("tokens/s/device", f"{s['tokens_per_s_per_device']:,.0f}", expected("tokens_per_s_per_device")),
        ]
        if s["mfu"] is not None:
            rows.append(("MFU", f"{100 * s['mfu']:.1f} %", expected("mfu")))
    memory = format_bytes(predicted["memory_bytes"]) if "memory_bytes" in predicted else "not predicted"
    rows.append(("peak memory", format_bytes(s["peak_memory_bytes"]), memory))
    return rows


def _shares(profile: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Time by kind of kernel. Every instant of a step counts once, so the shares sum to 1."""
    step_s = profile["window_s"] / len(profile["steps"])
    return [
        (name, f"{100 * share:.1f} %", format_seconds(share * step_s))
        for name, share in profile["shares"].items()
        if share > 0
    ]


def _phases(time_s: dict[str, float]) -> str:
    """The wall time, and its phases of at least 1 %."""
    total_s = time_s["total"]
    parts = [
        f"{name.replace('_', '-')} {100 * seconds / total_s:.0f} %"
        for name, seconds in time_s.items()
        if name != "total" and seconds >= 0.01 * total_s
    ]
    return f"{format_duration(total_s)} ({', '.join(parts)})"
