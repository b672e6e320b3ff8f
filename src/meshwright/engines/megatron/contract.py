"""The contract of the megatron engine (`engines.base`). Imports torch only to detect devices and to export weights."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines import external_record, external_workers
from meshwright.engines.base import TrainOptions, refuse
from meshwright.engines.external_workers import WorkersStart, expected
from meshwright.engines.megatron import probe
from meshwright.engines.megatron.check import check, check_export, check_plan, notes_on_data
from meshwright.engines.megatron.exporting import export_saved_weights
from meshwright.engines.megatron.importing import import_run
from meshwright.engines.megatron.lower import LAYOUT, lower, lower_export
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = [
    "check", "check_export", "expected", "export_saved_weights", "import_run", "launch", "lower", "lower_export",
    "prepare", "read",
]  # fmt: skip


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; write nothing and start no process of the training."""
    refuse("megatron", check(run))
    machine = probe.machine()
    probe.require_device(machine)
    return external_workers.start(
        run, options=options, engine="megatron", machine=machine, check_plan=check_plan, layout=LAYOUT
    )


def launch(start: WorkersStart) -> None:
    """Train with one process per device, or as the process of a launcher; then write the record."""
    lowered = lower(start.run, folder=start.options.folder)
    external_workers.launch(start, lowered, notes_on_data=notes_on_data)


def read(folder: Path) -> Record:
    """Return the record of a training that has ended; compose it from its files if there is none yet."""
    return external_record.read(folder, LAYOUT)
