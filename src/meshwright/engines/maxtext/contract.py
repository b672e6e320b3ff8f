"""MaxText behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.engines import external_record, external_workers, local
from meshwright.engines.base import TrainOptions, refuse
from meshwright.engines.external_workers import WorkersStart, expected
from meshwright.engines.maxtext import environment, probe
from meshwright.engines.maxtext.check import check, check_plan
from meshwright.engines.maxtext.exporting import export_weights
from meshwright.engines.maxtext.importing import import_run
from meshwright.engines.maxtext.lower import lower
from meshwright.engines.maxtext.parameters.leaves import file_shapes
from meshwright.engines.maxtext.results import LAYOUT
from meshwright.engines.maxtext.worker_inputs import adapters
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = ["check", "expected", "export_weights", "import_run", "launch", "lower", "prepare", "read"]


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("maxtext", check(run))
    external_workers.refuse_profile(options)
    adapters.refuse_other_base(run)
    machine = probe.machine(environment.require())
    start = external_workers.start(
        run, options=options, engine="maxtext", machine=machine, check_plan=check_plan, layout=LAYOUT,
        file_shapes=file_shapes(run.model),
    )  # fmt: skip
    return replace(start, is_one_process=start.device_type == "cpu" and not local.under_launcher())


def launch(start: WorkersStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end.

    On a CPU that no launcher has shared out, one process has all devices of the plan, as virtual ones.
    """
    lowered = replace(lower(start.run, folder=start.options.folder), num_processes=start.num_processes)
    external_workers.launch(start, lowered)


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return external_record.read(folder, LAYOUT)
