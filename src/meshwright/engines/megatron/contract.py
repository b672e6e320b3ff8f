"""Megatron-Core behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines import outcome, workers
from meshwright.engines.base import Imported, TrainOptions, refuse
from meshwright.engines.megatron import bridge_importing, importing, probe
from meshwright.engines.megatron.bridge_files import refuse_recipe, says_container
from meshwright.engines.megatron.check import check, check_export, check_plan
from meshwright.engines.megatron.lower import lower, lower_for_others
from meshwright.engines.megatron.reading import LAYOUT
from meshwright.engines.workers import WorkersStart, expected
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = [
    "check", "check_export", "expected", "import_run", "launch", "lower", "lower_for_others", "prepare", "read",
]  # fmt: skip


def import_run(source: str, *, cluster: str) -> Imported:
    """The run that options of Megatron-LM or a configuration of Megatron-Bridge describe on `cluster`.

    Raises InputError for what cannot be read or said in a run file.
    """
    refuse_recipe(source)
    reading = bridge_importing if says_container(source) else importing
    return reading.import_run(source, cluster=cluster)


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("megatron", check(run))
    workers.refuse_profile(options)
    machine = probe.machine()
    probe.require_device(machine)
    return workers.start(
        run, options=options, engine="megatron", machine=machine, check_plan=check_plan, layout=LAYOUT
    )


def launch(start: WorkersStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end."""
    lowered = lower(start.run, folder=start.options.folder)
    workers.launch(start, lowered)


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return outcome.read(folder, LAYOUT)
