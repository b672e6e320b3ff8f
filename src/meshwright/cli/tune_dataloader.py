"""`meshwright tune dataloader`: how many threads read a run's data, found by measurement and kept in its file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import budget_option, json_option, run_argument, set_option, verb
from meshwright.errors import InputError
from meshwright.specs.run import MAX_WORKERS, NATIVE, Run

if TYPE_CHECKING:
    from meshwright.bench.dataloader import Demand, LoaderCandidate, LoaderChoice
    from meshwright.engines.native.batch_loader import BatchLoader
    from meshwright.records.measurement import Measurement
    from meshwright.specs.plan import Plan

TRAINING, VALIDATION = "data.workers", "train.evaluate.workers"
"""Keys of the run file that hold the two counts."""

TAKEN = "taken"
VALIDATION_SHARE = 0.4  # of the budget


def _counts(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...] | None:
    """Counts in rising order, each once; None: auto."""
    if text.strip() == "auto":
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    allowed = f"auto, or counts of 0 to {MAX_WORKERS}, as in 0,1,2,4"
    if not words or not all(word.isdecimal() and int(word) <= MAX_WORKERS for word in words):
        raise InputError("--workers", got=text, allowed=allowed)
    return tuple(sorted({int(word) for word in words}))


@verb(
    "dataloader",
    examples=[
        "meshwright tune dataloader examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune dataloader run.yaml --workers 0,1,2,4,8,16 --budget 3m --apply",
        "meshwright tune dataloader run.yaml --step-time 1.8 --write tuned.yaml --json",
    ],
)
@run_argument()
@set_option
@click.option(
    "--workers", "counts", callback=_counts, default="auto", show_default=True, metavar="N,N,...",
    help="Counts to try; 0: the step reads for itself. auto: up to the cores that a process has.",
)  # fmt: skip
@click.option(
    "--step-time", "step_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="What a step takes, where it was measured.  [default: what the planner expects of the run]",
)  # fmt: skip
@budget_option(default="60s", help="Time to measure for; no count is measured less than three times.")
@click.option(
    "--write", "write_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.yaml",
    help="Write the run file with the counts in it.",
)  # fmt: skip
@click.option("--apply", "is_apply", is_flag=True, help="Write the counts into RUN.yaml itself.")
@json_option
def command(
    run_path: Path,
    overrides: tuple[str, ...],
    counts: tuple[int, ...] | None,
    step_s: float | None,
    budget_s: float,
    write_path: Path | None,
    is_apply: bool,
    as_json: bool,
) -> None:
    """Find how many threads should read a run's data, for training and for validation apart.

    Reads the run's own data, with its tokenizer and sequence length, with each count in turn: as fast as it comes,
    and beside a consumer that works as long as a step takes. Training needs the fewest threads with which no step
    waits; a validation is short, and is best served by the fewest with which a whole pass, their start included,
    takes no longer. Changes nothing without --write or --apply, which put data.workers and train.evaluate.workers
    into a run file, all or nothing.
    """
    from meshwright import runfile
    from meshwright.cli.output import emit_json

    if is_apply and write_path is not None:
        raise InputError("--apply and --write are both given", allowed="one of them")
    if is_apply and overrides:
        raise InputError(
            "--apply changes the file, and --set lays over it", hint="--write OUT.yaml writes both"
        )
    if write_path is not None and not write_path.parent.is_dir():
        raise InputError(f"cannot write {str(write_path)!r} (no such folder)")
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError(
            "only the native engine's reading is measured", got=run.engine, hint="--set engine=native"
        )
    require_torch("reading as training does")
    found = _measure(run, counts=counts, step_s=step_s, budget_s=budget_s)
    target = run_path.resolve() if is_apply else write_path
    if target is not None:
        runfile.write_text(_text(run, found), target)
    if as_json:
        emit_json(_document(run, found, target))
    else:
        _show(run, found, target)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured, and under which conditions."""

    plan: Plan
    demand: Demand
    num_cores: int
    processes: int  # of this host that read at the same time
    training: LoaderChoice
    validation: LoaderChoice | None  # None: the run takes no validation loss

    @property
    def values(self) -> dict[str, int]:
        """The keys of the run file, and what they should say."""
        values = {TRAINING: self.training.num_workers}
        return values if self.validation is None else values | {VALIDATION: self.validation.num_workers}


def _measure(run: Run, *, counts: tuple[int, ...] | None, step_s: float | None, budget_s: float) -> Found:
    from meshwright.cli.output import progress

    with progress("starting PyTorch"):
        from meshwright.bench.dataloader import tune_training, tune_validation, usual_counts
        from meshwright.engines.native import engine
        from meshwright.training import device as devices

    plan = run.plan or engine.plan_here(run, device=devices.find_device())
    processes = min(plan.num_devices, run.cluster.devices_per_node if run.cluster else plan.num_devices)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = counts or usual_counts(num_cores // processes)
    with progress("finding out what a step takes"):
        demand = _demand(run, plan, step_s=step_s)
    with progress("opening the data"):
        feed = _feed(run, plan)
    evaluate, validation = run.train.evaluate, None
    training_s = budget_s if evaluate is None else budget_s * (1 - VALIDATION_SHARE)
    with progress("reading as training does", total=training_s) as advance:
        training = tune_training(feed.batches, counts, demand, budget_s=training_s, advance=advance)
    if evaluate is not None:
        rest_s = budget_s - training_s
        with progress("reading as validation does", total=rest_s) as advance:
            validation = tune_validation(
                feed.validation or feed.batches, counts, demand,
                pass_batches=evaluate.num_batches, budget_s=rest_s, advance=advance,
            )  # fmt: skip
    return Found(
        plan=plan, demand=demand, num_cores=num_cores, processes=processes,
        training=training, validation=validation,
    )  # fmt: skip


def _demand(run: Run, plan: Plan, *, step_s: float | None) -> Demand:
    from meshwright.bench.dataloader import Demand
    from meshwright.engines.native import engine
    from meshwright.training import device as devices

    on_host = (run.cluster.accelerator.name if run.cluster else devices.find_device().type) == "cpu"
    if step_s is not None:
        return Demand(step_s=step_s, source="as given", on_host=on_host)
    predicted = engine.expected_of(run, plan=plan).predicted
    if predicted is None:
        return Demand(step_s=None, source="the planner has no model of this device", on_host=on_host)
    return Demand(step_s=predicted["step"]["value"], source="predicted", on_host=on_host)


def _feed(run: Run, plan: Plan) -> BatchLoader:
    """What the first process of the run reads."""
    from meshwright.engines.native.batch_loader import BatchLoader
    from meshwright.engines.native.parallel.mesh import MeshCoordinates
    from meshwright.training.data import open_data
    from meshwright.training.device import find_device

    return BatchLoader(
        run, coordinates=MeshCoordinates(plan=plan, device=find_device()), corpus=open_data(run)
    )


def _text(run: Run, found: Found) -> str:
    from meshwright import runfile

    data = replace(run.data, workers=found.values[TRAINING])
    train = run.train
    if train.evaluate is not None:
        train = replace(train, evaluate=replace(train.evaluate, workers=found.values[VALIDATION]))
    wanted = replace(run, data=data, train=train)
    return runfile.changed_text(run, found.values, wanted=wanted, what="the counts of workers")


def _before(run: Run) -> dict[str, int | None]:
    """What the run says so far; None: found in the first steps."""
    evaluate = run.train.evaluate
    return {TRAINING: run.data.workers} | ({} if evaluate is None else {VALIDATION: evaluate.workers})


# --- the document ---


def _document(run: Run, found: Found, target: Path | None) -> dict[str, Any]:
    return {
        "run": run.name,
        "source": run.data.source,
        "plan": found.plan.describe(),
        "cores": found.num_cores,
        "processes": found.processes,
        "step": {"seconds": found.demand.step_s, "source": found.demand.source},
        "training": _choice(found.training),
        "validation": None if found.validation is None else _choice(found.validation),
        "before": _before(run),
        "values": found.values,
        "written": target,
    }


def _choice(choice: LoaderChoice) -> dict[str, Any]:
    return {
        "workers": choice.num_workers,
        "reason": choice.reason,
        "batches": choice.num_batches,
        "pass_batches": choice.pass_batches,
        "candidates": [
            {
                "workers": c.num_workers,
                "tokens_per_s": c.rate,
                "first_batch_s": _statistics(c.first_s),
                "batch_s": _statistics(c.batch_s),
                "wait_s": _statistics(c.wait_s),
                "held_bytes": c.held_bytes,
            }
            for c in choice.candidates
        ],
    }


def _statistics(found: Measurement) -> dict[str, float]:
    low, high = found.interval
    return {"median": found.median, "low": low, "high": high, "n": found.n}


# --- words ---


def _show(run: Run, found: Found, target: Path | None) -> None:
    from meshwright.cli.output import print_line

    _show_training(found.training, found.demand)
    if found.validation is not None:
        print_line()
        _show_validation(found.validation, found.demand)
    print_line()
    if found.processes > 1:
        print_line(f"Measured in one process; {found.processes} of this host will read so at the same time.")
    before = _before(run)
    for key, value in found.values.items():
        was = "not set, so found in the first steps" if before[key] is None else before[key]
        print_line(f"{key}: {value}  (was: {was})", style="bold")
    if target is not None:
        print_line(f"Written to {target}.")
    else:
        print_line(
            "Nothing is changed: --apply writes this into the run file, --write OUT.yaml into another."
        )


def _show_training(choice: LoaderChoice, demand: Demand) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.units import format_bytes, format_seconds

    tokens = choice.candidates[0].tokens_per_batch
    if demand.step_s is None:
        needs = f"what a step takes is not known: {demand.source}"
    else:
        needs = f"a step of {format_seconds(demand.step_s)} ({demand.source}) takes {tokens:,} tokens: "
        needs += f"{tokens / demand.step_s:,.0f} tokens/s"
    print_line(f"Training: {needs}", style="bold")
    print_table(
        {"workers": "right", "first batch": "right", "tokens/s alone": "right", "a step waits": "right",
         "held": "right", "": "left"},
        [
            (
                c.num_workers, format_seconds(c.first_s.median), f"{c.rate:,.0f}", _spread(c.wait_s),
                format_bytes(c.held_bytes), _mark(c, choice, demand),
            )
            for c in choice.candidates
        ],
    )  # fmt: skip
    print_line(f"{choice.num_workers}: {choice.reason}.")


def _show_validation(choice: LoaderChoice, demand: Demand) -> None:
    from meshwright.bench.dataloader import FORWARD_SHARE
    from meshwright.cli.output import print_line, print_table
    from meshwright.units import format_bytes, format_seconds

    total = choice.pass_batches or choice.num_batches
    work_s = 0.0 if demand.step_s is None else demand.step_s * FORWARD_SHARE * total
    measured = "" if total == choice.num_batches else f", {choice.num_batches} of them measured"
    print_line(f"Validation: a pass of {total} batches{measured}", style="bold")
    print_table(
        {"workers": "right", "first batch": "right", "a pass waits": "right", "a pass takes": "right",
         "held": "right", "": "left"},
        [
            (
                c.num_workers, format_seconds(c.first_s.median), _spread(c.wait_s),
                format_seconds(work_s + c.wait_s.median), format_bytes(c.held_bytes),
                TAKEN if c.num_workers == choice.num_workers else "",
            )
            for c in choice.candidates
        ],
    )  # fmt: skip
    print_line(f"{choice.num_workers}: {choice.reason}.")


def _mark(c: LoaderCandidate, choice: LoaderChoice, demand: Demand) -> str:
    from meshwright.bench.dataloader import keeps_up

    is_slow = demand.step_s is not None and not keeps_up(c, demand.step_s)
    marks = (TAKEN if c.num_workers == choice.num_workers else "", "too slow" if is_slow else "")
    return ", ".join(mark for mark in marks if mark)


def _spread(found: Measurement) -> str:
    from meshwright.units import format_seconds

    low, high = found.interval
    return f"{format_seconds(found.median)} ({format_seconds(low)} to {format_seconds(high)})"
