"""The contract: what every engine offers, and what it hands back. Imports no tensor framework.

check(run)              -> what this engine cannot do of the run, with reasons: nothing is ever silently ignored
lower(run, folder=...)  -> a Launch: the files, arguments and environment that start it. Pure
prepare(run, ...)       -> a Start: all that is decided before the first process starts, this machine looked at
launch(start)           starts the processes on this machine, or takes part in those of a launcher, and waits
read(folder)            -> a Record: what was measured, on what, with which software; one FLOP rule for every engine
export_weights(run, ...) -> a checkpoint of its own as Hugging Face weights. Not every engine has this, nor the next
import_run(source, ...) -> what the engine's own configuration says, as a run file's content

An engine is a module with these functions, named as an entry point of the group `meshwright.engines`, beside its
`facts` (`meshwright.catalog.engines`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.catalog.engines import engine_contract
from meshwright.errors import InputError
from meshwright.records.training import Record
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

if TYPE_CHECKING:
    from meshwright.planner.estimate import PlanEstimate


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """One key of a run file that an engine cannot honour."""

    key: str  # as in the run file: parallel.context
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """Which steps are profiled, counted from 1, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a command line adds to a run."""

    folder: Path  # where results go: steps, record, resolved run
    resume: bool = False
    command: tuple[str, ...] = ()  # as the user typed it, for the record
    quiet: bool = False  # no progress on stderr
    max_restarts: int = 0  # after a worker was lost; needs checkpoints
    timeout_s: float = 600.0  # of one step; then the run counts as hung
    started_s: float = field(default_factory=time.time)  # Unix time at which the command began
    only_steps: bool = False  # for measuring: no text sample, no adapter when the steps are taken
    profile: bool = False  # write a trace of some steps
    profile_steps: ProfileSteps | None = None  # None: a few after the warm-up


def predicted(estimate: PlanEstimate, *, memory_bytes: float) -> dict[str, Any]:
    """What a record holds of the estimate of its plan; `memory_bytes` of a device at the peak."""
    step = estimate.step
    return {
        "step": step.step.as_json(),
        "tokens_per_s_per_device": step.tokens_per_s_per_device.as_json(),
        "mfu": step.mfu.as_json(),
        "memory_bytes": memory_bytes,
        "components_s": step.components_s,
        "uncertainty": estimate.uncertainty,
    }


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one engine is started: what a launcher needs, and nothing of the machine that it runs on.

    `argv` begins with `python`: the interpreter is the launcher's choice, on each host. It starts `num_processes`
    processes with `argv`, one a device, all in the folder in which the user gave the command, and tells each where it
    stands as torchrun does (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """

    argv: tuple[str, ...]
    files: Mapping[str, str]  # path below the folder of the results -> text; every host needs them
    env: Mapping[str, str] = field(default_factory=dict)  # of every process
    num_processes: int


class Start(Protocol):
    """All that is decided before the first process starts. An engine's own has more."""

    @property
    def run(self) -> Run: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def options(self) -> TrainOptions: ...
    @property
    def device_name(self) -> str:
        """As its driver has it."""
        ...

    @property
    def num_processes(self) -> int:
        """Of the whole training: one a device, or one that has them all."""
        ...

    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the planner expects of a start."""

    predicted: dict[str, Any] | None  # as in a record; None: nothing was predicted
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An engine's own configuration as the content of a run file, and what of it is not in there."""

    content: dict[str, Any]
    notes: tuple[str, ...]


class ImportingEngine(Protocol):
    """What an engine offers besides the contract when its own configurations can be read back."""

    def import_run(self, source: str, *, cluster: str) -> Imported:
        """The run on `cluster` that `source`, a path or what else the engine calls a configuration, describes.

        Every setting is carried, known to mean nothing here, or named in a note; what is not said takes the engine's
        defaults. Raises InputError for what cannot be read or what no run file can say, MissingDependencyError where
        the engine must be installed to read it.
        """
        ...


class ExportingEngine(Protocol):
    """What an engine offers besides the contract when its checkpoints are its own and become Hugging Face weights."""

    def export_weights(self, run: Run, *, step: int | None, folder: Path, dtype: str) -> Path:
        """Write the weights of a checkpoint of `run` (None: the newest) as safetensors with a config.json.

        Returns the checkpoint. Raises InputError where there is none, or `folder` is not empty;
        MissingDependencyError where the engine must be installed.
        """
        ...


class OthersEngine(Protocol):
    """What an engine offers besides the contract when programs of others can do more with it than the training here."""

    def check_export(self, run: Run) -> tuple[Unsupported, ...]:
        """What these programs cannot do of `run` either. Pure."""
        ...

    def lower_for_others(self, run: Run, *, folder: Path) -> Launch:
        """As `lower`, for them alone. Raises InputError for what `check_export` refuses."""
        ...


class TrainingEngine(Protocol):
    """The contract, as the command line sees it. Modules fulfil it with functions."""

    def check(self, run: Run) -> tuple[Unsupported, ...]:
        """What this engine cannot do of `run`. Empty: it does all of it. Pure."""
        ...

    def lower(self, run: Run, *, folder: Path) -> Launch:
        """How to start `run`, whose plan is pinned, with results in `folder`. Pure, and the same everywhere.

        Raises InputError for what `check` refuses.
        """
        ...

    def prepare(self, run: Run, *, options: TrainOptions) -> Start:
        """Decide everything for this machine; write nothing.

        Raises InputError for what `check` refuses, MissingDependencyError when a package or device is absent.
        """
        ...

    def expected(self, start: Any) -> Prediction:
        """What to expect of `start`, for a dry run."""
        ...

    def launch(self, start: Any) -> None:
        """Train on this machine, or take part in the processes of a launcher, until all steps are taken."""
        ...

    def read(self, folder: Path) -> Record:
        """The record of the training whose results are in `folder`."""
        ...


def find_engine(name: str) -> TrainingEngine:
    """The engine called `name`. Raises as `catalog.engine_facts`."""
    return engine_contract(name)


def check_export(run: Run) -> tuple[Unsupported, ...]:
    """What no program of the engine that `run` names can do of it, be it started here or elsewhere."""
    engine = find_engine(run.engine)
    return getattr(engine, "check_export", engine.check)(run)


def pinned(run: Run) -> Plan:
    """The plan of `run`, which `lower` needs. Raises InputError where there is none."""
    if run.plan is None:
        raise InputError(
            f"{run.source}: parallel is auto, and nothing can be started without a plan",
            hint="meshwright plan RUN.yaml --write PINNED.yaml pins one",
        )
    return run.plan


def refuse(engine: str, problems: Iterable[Unsupported]) -> None:
    """Raise one InputError that lists all `problems`; return when there is none."""
    problems = tuple(problems)
    if not problems:
        return
    words = "; ".join(str(p) for p in problems)
    hints = "; ".join(dict.fromkeys(p.hint for p in problems if p.hint))
    raise InputError(f"the {engine} engine cannot do this run: {words}", hint=hints or None)
