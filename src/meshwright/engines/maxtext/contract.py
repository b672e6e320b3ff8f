"""The contract of the maxtext engine (`engines.base`). Imports torch only to detect this machine's devices."""

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
from meshwright.errors import InputError
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = ["check", "expected", "export_weights", "import_run", "launch", "lower", "prepare", "read"]


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; write nothing and start no process of the training."""
    refuse("maxtext", check(run))
    adapters.refuse_other_base(run)
    machine = probe.machine(environment.require())
    if options.is_profiled and machine.device_type != "cpu":
        raise InputError("MaxText's traces are read on a CPU only", got="--profile", hint="leave it out")
    start = external_workers.start(
        run, options=options, engine="maxtext", machine=machine, check_plan=check_plan, layout=LAYOUT,
        file_shapes=file_shapes(run.model),
    )  # fmt: skip
    return replace(start, is_one_process=start.device_type == "cpu" and not local.under_launcher())


def launch(start: WorkersStart) -> None:
    """Train with one process per device, or as the process of a launcher; then write the record.

    On a CPU without a launcher, one process has all devices of the plan as virtual devices.
    """
    lowered = replace(lower(start.run, folder=start.options.folder), num_processes=start.num_processes)
    external_workers.launch(start, lowered)


def read(folder: Path) -> Record:
    """Return the record of a training that has ended; compose it from its files if there is none yet."""
    return external_record.read(folder, LAYOUT)
