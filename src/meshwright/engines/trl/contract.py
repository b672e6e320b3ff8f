"""The contract of the trl engine (`engines.base`): its runs are written and started by hand, `train` refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from meshwright.engines.base import TrainOptions
from meshwright.engines.trainers.run_content import import_trainer as import_run
from meshwright.engines.trl.check import check
from meshwright.engines.trl.lower import lower
from meshwright.errors import InputError
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = ["check", "expected", "import_run", "launch", "lower", "prepare", "read"]


def prepare(run: Run, *, options: TrainOptions) -> NoReturn:
    """Raise InputError: Meshwright starts no training of TRL."""
    raise InputError(
        "trainings of TRL are started by hand",
        got="engine: trl",
        hint=f"`meshwright export {run.source} --engine trl --out DIR` writes the file and prints the command",
    )


def launch(start: Any) -> NoReturn:
    """Raise as `prepare`: nothing starts."""
    prepare(start.run, options=start.options)


expected = launch


def read(folder: Path) -> Record:
    """Raise ValueError: no folder is of a training that Meshwright started."""
    raise ValueError(f"{folder} is of no training: Meshwright starts none of TRL")
