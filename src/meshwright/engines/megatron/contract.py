"""Megatron-Core behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines import external_record, external_workers
from meshwright.engines.base import TrainOptions, refuse
from meshwright.engines.external_workers import WorkersStart, expected
from meshwright.engines.megatron import probe
from meshwright.engines.megatron.check import check, check_export, check_plan
from meshwright.engines.megatron.exporting import export_saved_weights
from meshwright.engines.megatron.importing import import_run
from meshwright.engines.megatron.lower import lower, lower_export
from meshwright.engines.megatron.results import LAYOUT
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = [
    "check", "check_export", "expected", "export_saved_weights", "import_run", "launch", "lower", "lower_export",
    "prepare", "read",
]  # fmt: skip


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("megatron", check(run))
    external_workers.refuse_profile(options)
    machine = probe.machine()
    probe.require_device(machine)
    return external_workers.start(
        run, options=options, engine="megatron", machine=machine, check_plan=check_plan, layout=LAYOUT
    )


def launch(start: WorkersStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end."""
    lowered = lower(start.run, folder=start.options.folder)
    external_workers.launch(start, lowered)


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return external_record.read(folder, LAYOUT)
