"""The native engine behind the contract of `engines.base`. Imports torch only when it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.engines.base import Launch, StartPrediction, TrainOptions, pinned_plan, refuse
from meshwright.engines.native.check import check
from meshwright.engines.trainers.run_content import import_trainer as import_run
from meshwright.records.training import Record, read_record
from meshwright.specs.run import Run

if TYPE_CHECKING:
    from meshwright.engines.native.prepared import PreparedRun
    from meshwright.engines.observer import TrainingObserver

__all__ = ["check", "expected", "import_run", "launch", "launch_observed", "lower", "prepare", "read"]

RUN_FILE = "run.yaml"


def lower(run: Run, *, folder: Path) -> Launch:
    """The run file with its plan pinned, and `meshwright train` of it by every process."""
    from meshwright.runfile import pinned_text

    refuse("native", check(run))
    plan = pinned_plan(run)
    return Launch(
        argv=("python", "-m", "meshwright", "train", str(folder / RUN_FILE), "--out", str(folder)),
        files={RUN_FILE: pinned_text(run, plan)},
        num_processes=plan.num_devices,
    )


def prepare(run: Run, *, options: TrainOptions) -> PreparedRun:
    """See `engine.prepare`."""
    from meshwright.engines.native import engine

    return engine.prepare(run, options=options)


def expected(start: PreparedRun) -> StartPrediction:
    """Predict from a quick measurement of this machine."""
    from meshwright.engines.native import engine

    found = engine.expected(start)
    return StartPrediction(predicted=found.predicted, notes=found.notes)


def launch(start: PreparedRun) -> None:
    """One process a device, here or as torchrun has started them."""
    from meshwright.engines.native import engine

    engine.launch(start)


takes_warm_up = True


def launch_observed(start: PreparedRun, *, observer: TrainingObserver, warm_up_steps: int) -> None:
    """See `base.ObservedEngine`."""
    launch(replace(start, observer=observer, warm_up_steps=warm_up_steps))


def read(folder: Path) -> Record:
    """The record that the main process wrote."""
    return read_record(folder)
