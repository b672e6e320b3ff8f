"""The part of `meshwright tune dataloader` that imports PyTorch: measure reading with each number of threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.bench import dataloader
from meshwright.bench.dataloader import Demand, LoaderCandidate, LoaderChoice
from meshwright.cli.output import print_line, print_table, progress
from meshwright.engines.native import engine
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.records.measurement import Measurement
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.data import open_data
from meshwright.units import format_bytes, format_seconds

TRAINING, VALIDATION = "data.workers", "train.evaluate.workers"
"""Keys of the run file that hold the two numbers of threads."""

CHOSEN = "chosen"
VALIDATION_SHARE = 0.4  # of the budget


@dataclass(frozen=True, kw_only=True)
class LoaderTuning:
    """Numbers of data loading threads found for a run, with the measurements and their conditions."""

    run: Run
    plan: Plan
    demand: Demand
    num_cores: int
    processes: int  # of this host that read at the same time
    training: LoaderChoice
    validation: LoaderChoice | None  # None: the run has no validation

    @property
    def values(self) -> dict[str, int]:
        """Keys of the run file and the numbers found for them."""
        values = {TRAINING: self.training.num_workers}
        return values if self.validation is None else values | {VALIDATION: self.validation.num_workers}

    @property
    def before(self) -> dict[str, int | None]:
        """Keys of the run file and their values; None where training finds the number in its first steps."""
        evaluate = self.run.train.evaluate
        return {TRAINING: self.run.data.workers} | ({} if evaluate is None else {VALIDATION: evaluate.workers})

    def text(self) -> str:
        """Text of the run file with the numbers found."""
        run, train = self.run, self.run.train
        if train.evaluate is not None:
            train = replace(train, evaluate=replace(train.evaluate, workers=self.values[VALIDATION]))
        wanted = replace(run, data=replace(run.data, workers=self.values[TRAINING]), train=train)
        return runfile.changed_text(run, self.values, wanted=wanted, what="the counts of workers")

    def document(self, target: Path | None) -> dict[str, Any]:
        """The JSON document. `target`: the file that was written, if any."""
        return {
            "run": self.run.name,
            "source": self.run.data.source_text,
            "plan": self.plan.describe(),
            "cores": self.num_cores,
            "processes": self.processes,
            "step": {"seconds": self.demand.step_s, "source": self.demand.source},
            "training": _choice(self.training),
            "validation": None if self.validation is None else _choice(self.validation),
            "before": self.before,
            "values": self.values,
            "written": target,
        }

    def show(self, target: Path | None) -> None:
        """Print the measurements, and the old and new values of the run file."""
        _show_training(self.training, self.demand)
        if self.validation is not None:
            print_line()
            _show_validation(self.validation, self.demand)
        print_line()
        if self.processes > 1:
            print_line(f"Measured in one process; {self.processes} of this host will read at the same time.")
        for key, value in self.values.items():
            before = self.before[key]
            was = "not set, so found in the first steps" if before is None else before
            print_line(f"{key}: {value}  (was: {was})", style="bold")
        if target is not None:
            print_line(f"Written to {target}.")
        else:
            print_line("Nothing is changed: --apply writes this into the run file, --write OUT.yaml into another.")


def tune_run(run: Run, *, counts: tuple[int, ...] | None, step_s: float | None, budget_s: float) -> LoaderTuning:
    """Read the run's data with each number of threads (None: the usual ones) within the time budget."""
    plan = engine.plan_here(run, device=devices.find_device())
    processes = min(plan.num_devices, run.cluster.devices_per_node if run.cluster else plan.num_devices)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = counts or dataloader.usual_counts(num_cores // processes)
    with progress("estimating the step time"):
        demand = _demand(run, plan, step_s=step_s)
    with progress("opening the data"):
        loader = BatchLoader(
            run, coordinates=MeshCoordinates(plan=plan, device=devices.find_device()), corpus=open_data(run)
        )
    evaluate, validation = run.train.evaluate, None
    training_s = budget_s if evaluate is None else budget_s * (1 - VALIDATION_SHARE)
    with progress("reading as training does", total=training_s) as advance:
        training = dataloader.tune_training(loader.batches, counts, demand, budget_s=training_s, advance=advance)
    if evaluate is not None:
        rest_s = budget_s - training_s
        with progress("reading as validation does", total=rest_s) as advance:
            validation = dataloader.tune_validation(
                loader.validation or loader.batches, counts, demand,
                pass_batches=next(iter(loader.num_validation_batches.values())), budget_s=rest_s, advance=advance,
            )  # fmt: skip
    return LoaderTuning(
        run=run, plan=plan, demand=demand, num_cores=num_cores, processes=processes,
        training=training, validation=validation,
    )  # fmt: skip


def _demand(run: Run, plan: Plan, *, step_s: float | None) -> Demand:
    on_host = (run.cluster.accelerator.name if run.cluster else devices.find_device().type) == "cpu"
    if step_s is not None:
        return Demand(step_s=step_s, source="as given", on_host=on_host)
    predicted = engine.expected_of(run, plan=plan).predicted
    if predicted is None:
        return Demand(step_s=None, source="the planner has no model of this device", on_host=on_host)
    return Demand(step_s=predicted["step"]["value"], source="predicted", on_host=on_host)


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
                "first_batch_s": c.first_s.as_document(),
                "batch_s": c.batch_s.as_document(),
                "wait_s": c.wait_s.as_document(),
                "held_bytes": c.held_bytes,
            }
            for c in choice.candidates
        ],
    }


def _show_training(choice: LoaderChoice, demand: Demand) -> None:
    tokens = choice.candidates[0].tokens_per_batch
    if demand.step_s is None:
        needs = f"the step time is not known: {demand.source}"
    else:
        needs = f"a step of {format_seconds(demand.step_s)} ({demand.source}) takes {tokens:,} tokens: "
        needs += f"{tokens / demand.step_s:,.0f} tokens/s"
    print_line(f"Training: {needs}", style="bold")
    print_table(
        {"workers": "right", "first batch": "right", "peak tokens/s": "right", "a step waits": "right",
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
    total = choice.pass_batches or choice.num_batches
    work_s = 0.0 if demand.step_s is None else demand.step_s * dataloader.FORWARD_SHARE * total
    measured = "" if total == choice.num_batches else f", {choice.num_batches} of them measured"
    print_line(f"Validation: a pass of {total} batches{measured}", style="bold")
    print_table(
        {"workers": "right", "first batch": "right", "a pass waits": "right", "a pass takes": "right",
         "held": "right", "": "left"},
        [
            (
                c.num_workers, format_seconds(c.first_s.median), _spread(c.wait_s),
                format_seconds(work_s + c.wait_s.median), format_bytes(c.held_bytes),
                CHOSEN if c.num_workers == choice.num_workers else "",
            )
            for c in choice.candidates
        ],
    )  # fmt: skip
    print_line(f"{choice.num_workers}: {choice.reason}.")


def _mark(c: LoaderCandidate, choice: LoaderChoice, demand: Demand) -> str:
    is_slow = demand.step_s is not None and not dataloader.keeps_up(c, demand.step_s)
    marks = (CHOSEN if c.num_workers == choice.num_workers else "", "too slow" if is_slow else "")
    return ", ".join(mark for mark in marks if mark)


def _spread(found: Measurement) -> str:
    low, high = found.interval
    return f"{format_seconds(found.median)} ({format_seconds(low)} to {format_seconds(high)})"
