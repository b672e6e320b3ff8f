"""The contract of `engine: any` (`engines.base`): it refuses to check, export and train, and says what does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from meshwright.catalog.lookup import engine_names
from meshwright.engines.base import Launch, StartPrediction, TrainOptions, Unsupported, refuse
from meshwright.records.training import Record
from meshwright.specs.run import Run

__all__ = ["check", "expected", "launch", "lower", "prepare", "read"]


def check(run: Run) -> tuple[Unsupported, ...]:
    """Refuse every run."""
    return (
        Unsupported(
            key="engine",
            reason="any plans and estimates for every program, and runs none",
            hint=f"--engine {' or '.join(engine_names())}; `meshwright plan` with it says what it runs",
        ),
    )


def lower(run: Run, *, folder: Path) -> Launch:
    """Raise InputError."""
    _refuse(run)


def prepare(run: Run, *, options: TrainOptions) -> NoReturn:
    """Raise InputError."""
    _refuse(run)


def expected(start: Any) -> StartPrediction:
    """Raise InputError: nothing starts."""
    _refuse(start.run)


def launch(start: Any) -> None:
    """Raise InputError: nothing starts."""
    _refuse(start.run)


def read(folder: Path) -> Record:
    """Raise ValueError: no folder is of a training of this engine."""
    raise ValueError(f"{folder} is of no training: engine any trains nothing")


def _refuse(run: Run) -> NoReturn:
    refuse("any", check(run))
    raise AssertionError("every run is refused")
