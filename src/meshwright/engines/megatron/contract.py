"""Megatron-Core behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.engines import outcome, workers
from meshwright.engines.base import RECORD, Prediction, Record, TrainOptions, read_record, refuse
from meshwright.engines.megatron import VERSION, probe
from meshwright.engines.megatron.check import check, check_plan
from meshwright.engines.megatron.importing import import_run
from meshwright.engines.megatron.lower import lower
from meshwright.engines.megatron.reading import LAYOUT
from meshwright.engines.workers import WorkersStart
from meshwright.errors import MissingDependencyError
from meshwright.specs.run import Engine, Run

__all__ = ["check", "expected", "import_run", "launch", "lower", "prepare", "read"]


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("megatron", check(run))
    workers.refuse_profile(options)
    machine = probe.machine()
    if not machine.num_devices:
        raise MissingDependencyError(
            f"megatron-core {VERSION} needs a CUDA device, and this machine has none: its layers ask CUDA for memory",
            hint="--set engine=native trains on this machine's CPU",
        )
    here = {"device_type": machine.device_type, "num_devices": machine.num_devices}
    cluster = run.cluster or workers.cluster_here(run, **here)
    plan = run.plan or workers.best_plan(
        replace(run, cluster=cluster), engine=Engine.MEGATRON, problems=lambda p: check_plan(p, run=run)
    )
    refuse("megatron", check_plan(plan, run=run))
    workers.refuse_devices(plan, **here)
    workers.refuse_checkpoints(run, options, layout=LAYOUT)
    return WorkersStart(
        run=replace(run, plan=plan, micro_batch=plan.micro_batch),
        plan=plan,
        options=options,
        device_type=machine.device_type,
        device_name=machine.device_name,
        cluster=cluster,
        notes=workers.notes_on_weights(run),
    )


def expected(start: WorkersStart) -> Prediction:
    """What the planner expects of a device that the catalogue knows."""
    return workers.expected(start, engine=Engine.MEGATRON)


def launch(start: WorkersStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end."""
    lowered = lower(start.run, folder=start.options.folder)
    workers.launch(start, lowered, layout=LAYOUT, prediction=expected(start))


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return read_record(folder) if (folder / RECORD).is_file() else outcome.compose(folder, LAYOUT)
