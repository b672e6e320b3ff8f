"""MaxText behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from meshwright.engines import outcome, workers
from meshwright.engines.base import RECORD, Prediction, Record, TrainOptions, read_record, refuse
from meshwright.engines.maxtext import environment, probe
from meshwright.engines.maxtext.check import check, check_plan
from meshwright.engines.maxtext.exporting import export_weights
from meshwright.engines.maxtext.importing import import_run
from meshwright.engines.maxtext.lower import lower
from meshwright.engines.maxtext.reading import LAYOUT
from meshwright.engines.workers import WorkersStart
from meshwright.specs.run import Engine, Run

__all__ = ["check", "expected", "export_weights", "import_run", "launch", "lower", "prepare", "read"]


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("maxtext", check(run))
    workers.refuse_profile(options)
    machine = probe.machine(environment.require())
    device_type = "cpu" if machine.platform == "cpu" else "cuda"  # as PyTorch calls it, ROCm's too
    here = {"device_type": device_type, "num_devices": machine.num_devices}
    cluster = run.cluster or workers.cluster_here(run, **here)
    plan = run.plan or workers.best_plan(
        replace(run, cluster=cluster), engine=Engine.MAXTEXT, problems=lambda p: check_plan(p, run=run)
    )
    refuse("maxtext", check_plan(plan, run=run))
    workers.refuse_devices(plan, **here)
    workers.refuse_checkpoints(run, options, layout=LAYOUT)
    return WorkersStart(
        run=replace(run, plan=plan, micro_batch=plan.micro_batch),
        plan=plan,
        options=options,
        device_type=device_type,
        device_name=machine.device_name,
        cluster=cluster,
        notes=workers.notes_on_weights(run),
    )


def expected(start: WorkersStart) -> Prediction:
    """What the planner expects of a device that the catalogue knows."""
    return workers.expected(start, engine=Engine.MAXTEXT)


def launch(start: WorkersStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end.

    On a CPU that no launcher has shared out, one process has all devices of the plan, as virtual ones.
    """
    lowered = lower(start.run, folder=start.options.folder)
    if start.device_type == "cpu" and "RANK" not in os.environ:
        lowered = replace(lowered, num_processes=1)
    workers.launch(start, lowered, layout=LAYOUT, prediction=expected(start))


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return read_record(folder) if (folder / RECORD).is_file() else outcome.compose(folder, LAYOUT)
