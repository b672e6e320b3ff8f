"""`meshwright train`: train the model of a run file on this machine, or as one process of a launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import json_option, run_argument, set_option, verb
from meshwright.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from meshwright.engines.base import Record
    from meshwright.engines.native.trainer import Job
    from meshwright.specs.run import Run

RESULTS = Path("runs")


@verb(
    "train",
    examples=[
        "meshwright train examples/runs/tiny-llama-cpu.yaml",
        "meshwright train examples/runs/tiny-llama-cpu.yaml --set train.steps=20 --json",
        "meshwright train run.yaml --resume",
        "meshwright train run.yaml --dry-run",
    ],
)
@run_argument()
@set_option
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where results go.  [default: runs/NAME]",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, metavar="N",
    help="How often to start again after a process was lost.  [default: 0]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be trained, and where; train nothing.")
@json_option
def command(
    run_path: Path,
    overrides: tuple[str, ...],
    folder: Path | None,
    resume: bool,
    max_restarts: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the model of a run file.

    Uses the accelerators of this machine, or its CPU where there are none. A plan of several processes starts them
    here; under torchrun each of its processes runs this command. Steps, the resolved run and the record are written
    to --out; SIGTERM saves a checkpoint and stops, --resume goes on from the newest one.
    """
    from meshwright import runfile

    run = runfile.load(run_path, overrides=overrides)
    _require_native(run)
    require_torch("training")

    from meshwright.engines.base import TrainOptions
    from meshwright.engines.native import engine

    folder = folder or _default_folder(run.name, resume=resume)
    options = TrainOptions(
        folder=folder, resume=resume, command=("meshwright", *sys.argv[1:]), max_restarts=max_restarts
    )
    if dry_run:
        _show_plan(engine.prepare(run, options=options), as_json=as_json)
        return
    record = engine.train(run, options=options)
    if _is_reporter():
        _show(record, folder=folder, as_json=as_json)
    _leave(record, folder=folder)


def _require_native(run: Run) -> None:
    from meshwright.specs.run import Engine

    if run.engine is not Engine.NATIVE:
        raise InputError(
            "this version trains with its own engine only", got=run.engine.value, allowed="native",
            hint="--set engine=native",
        )  # fmt: skip


def _default_folder(name: str, *, resume: bool) -> Path:
    """runs/NAME; a new training takes the next free number, a resumed one the newest that is there."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    candidates = [RESULTS / safe, *(RESULTS / f"{safe}-{i}" for i in range(2, 10_000))]
    first_free = next(i for i, path in enumerate(candidates) if not path.exists())
    return candidates[max(0, first_free - 1) if resume else first_free]


def _is_reporter() -> bool:
    """Under a launcher only the first process answers."""
    return os.environ.get("RANK", "0") == "0"


def _leave(record: Record, *, folder: Path) -> None:
    from meshwright.engines.base import Ending
    from meshwright.engines.native.faults import STOPPED_EXIT_CODE

    if record.ending is Ending.STOPPED:
        raise click.exceptions.Exit(STOPPED_EXIT_CODE)
    if record.ending is Ending.DIVERGED:
        raise InfeasibleError(
            f"the loss of step {record.statistics['steps'] + 1} is not a number",
            hint=f"lower optimizer.learning_rate or lengthen warmup_steps; the steps are in {folder}",
        )


def _show_plan(job: Job, *, as_json: bool) -> None:
    from meshwright.cli.output import emit_json, note, print_line, print_table

    if as_json:
        document = {
            "plan": job.plan, "num_steps": job.run.num_steps, "predicted": job.predicted,
            "folder": job.options.folder, "notes": job.notes,
        }  # fmt: skip
        emit_json(document)
        return
    print_line(f"{job.run.name}: {job.run.model.name}, {job.plan.describe()}", style="bold")
    rows = [
        ("processes", job.plan.num_devices),
        ("steps", f"{job.run.num_steps:,}"),
        ("tokens per step", f"{job.run.tokens_per_step:,}"),
        ("results", job.options.folder),
    ]
    if job.predicted is not None:
        rows.append(("expected step", _interval(job.predicted["step"])))
    print_table({"": "left", " ": "left"}, rows)
    for words in job.notes:
        note(words)


def _show(record: Record, *, folder: Path, as_json: bool) -> None:
    from meshwright.cli.output import emit_json, note, print_line, print_table

    if as_json:
        emit_json(record)
        return
    s = record.statistics
    print_line(
        f"{record.run['name']}: {record.run['model']['name']}, {record.run['plan_in_words']}", style="bold"
    )
    print_table({"": "left", "measured": "right", "predicted (80 % interval)": "right"}, _rows(record))
    print_line(f"MFU: {s['mfu_convention']}.")
    if record.sample:
        print_line()
        print_line("The model writes:", style="bold")
        print_line(record.sample)
    print_line()
    print_line(f"Results: {folder}")
    for words in record.notes:
        note(words)


def _rows(record: Record) -> list[tuple[str, str, str]]:
    from meshwright.units import format_bytes, format_seconds

    s, predicted = record.statistics, record.predicted or {}

    def expected(name: str) -> str:
        return _interval(predicted[name]) if name in predicted else "not predicted"

    rows = [("steps", f"{s['steps']:,}", ""), ("tokens", f"{s['tokens']:,}", "")]
    if s["first_loss"] is not None:
        rows.append(("loss, first to last step", f"{s['first_loss']:.3f} to {s['last_loss']:.3f}", ""))
    if s["validation_loss"] is not None:
        rows.append(("validation loss", f"{s['validation_loss']:.3f}", ""))
    if s["step_s"]["n"]:
        rows += [
            ("step, median", format_seconds(s["step_s"]["median"]), expected("step")),
            (
                "tokens/s/device",
                f"{s['tokens_per_s_per_device']:,.0f}",
                expected("tokens_per_s_per_device"),
            ),
            ("MFU", f"{100 * s['mfu']:.1f} %", expected("mfu")),
        ]
    memory = format_bytes(predicted["memory_bytes"]) if "memory_bytes" in predicted else "not predicted"
    rows.append(("peak memory", format_bytes(s["peak_memory_bytes"]), memory))
    return rows


def _interval(estimate: dict[str, Any]) -> str:
    from meshwright.units import format_seconds

    def words(value: float) -> str:
        if estimate["unit"] == "s":
            return format_seconds(value)
        return f"{100 * value:.1f} %" if estimate["unit"] == "ratio" else f"{value:,.0f}"

    return f"{words(estimate['value'])} ({words(estimate['low'])} to {words(estimate['high'])})"
