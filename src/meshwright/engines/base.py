"""The contract between Meshwright and an engine. Imports no tensor framework.

An engine is a module with these functions, named by an entry point of the group `meshwright.engines`. Its `facts`
(`meshwright.catalog.engines`) are in the same package.

    check(run)              -> parts of the run that the engine does not support, with reasons; nothing is ignored
    lower(run, folder=...)  -> a Launch: files, arguments and environment that start the run. Pure
    prepare(run, ...)       -> a Start: every decision before the first process starts, for this machine
    expected(start)         -> the prediction for a start
    launch(start)           starts the processes on this machine, or joins those of a launcher, and waits
    read(folder)            -> a Record: the measurements, the device and the software; every engine counts FLOPs alike

Some engines have further functions. Each is described by a protocol, and an engine has it if it has the functions of
the protocol: `isinstance(find_engine(name), ImportingEngine)`.

    ImportingEngine         import_run: reads the engine's own configurations into run files
    WeightsEngine           export_weights: its checkpoints, in a format and folders of its own, as Hugging Face weights
    SavedWeightsEngine      export_saved_weights: the same for its checkpoints in Meshwright's folders
    ObservedEngine          launch_observed: reports when data is opened, and every evaluation, to an observer
    ExternalProgramsEngine  check_export, lower_export: files for programs that support more than training here
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from meshwright.catalog.engines import engine_contract
from meshwright.errors import InputError
from meshwright.files import is_there
from meshwright.records.training import Record
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.profiling.steps import ProfileSteps

if TYPE_CHECKING:
    from meshwright.engines.observer import TrainingObserver
    from meshwright.planner.estimate import PlanEstimate
    from meshwright.training.checkpoints import Content, SavedCheckpoint


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A key of a run file that an engine does not support."""

    key: str  # as in the run file: parallel.context
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Measuring(StrEnum):
    """Measurement of this machine before a training, for its prediction."""

    ONCE = "once"  # reuse what is kept of this machine, or measure it for two to six seconds and keep that
    AGAIN = "again"  # measure it, for longer, and replace what is kept
    NEVER = "never"  # use what is kept, measure nothing


def measuring_of(measure: bool | None) -> Measuring:
    """Return the measuring that `--measure` (True), `--no-measure` (False) or neither (None) asks for."""
    return {None: Measuring.ONCE, True: Measuring.AGAIN, False: Measuring.NEVER}[measure]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training that are not part of the run file."""

    folder: Path  # of the results: steps, record, resolved run
    resume: bool = False
    command: tuple[str, ...] = ()  # as typed, for the record
    quiet: bool = False  # no progress on stderr
    max_restarts: int = 0  # after a lost worker; needs checkpoints
    timeout_s: float = 600.0  # of one step, after which the run counts as hung
    started_s: float = field(default_factory=time.time)  # Unix time at which the command began
    only_steps: bool = False  # for benchmarks: no text sample and no adapter at the end
    measuring: Measuring = Measuring.ONCE
    profile: bool = False  # write a trace of some steps
    profile_steps: ProfileSteps | None = None  # None: some steps after the warm-up

    @property
    def is_profiled(self) -> bool:
        """True if some steps are to be profiled."""
        return self.profile or self.profile_steps is not None


def predicted(estimate: PlanEstimate, *, memory_bytes: float) -> dict[str, Any]:
    """Return the estimate of a plan as a record contains it; `memory_bytes` is the peak of a device."""
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
    """Everything that a launcher needs to start an engine, independent of the machine.

    `argv` begins with `python`: the launcher chooses the interpreter on each host. It starts `num_processes` processes
    with `argv`, one per device, in the working directory of the command, and sets the variables that torchrun sets
    (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """

    argv: tuple[str, ...]
    files: Mapping[str, str]  # path below the folder of the results -> text; needed on every host
    env: Mapping[str, str] = field(default_factory=dict)  # for every process
    num_processes: int
    resumes: bool = True  # a later start continues from the run's checkpoints


class Start(Protocol):
    """Every decision before the first process starts. An engine's own class has more fields."""

    @property
    def run(self) -> Run: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def options(self) -> TrainOptions: ...
    @property
    def device_name(self) -> str:
        """Name of the device in its driver."""
        ...

    @property
    def num_processes(self) -> int:
        """Processes of the whole training: one per device, or one with all devices."""
        ...

    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class StartPrediction:
    """The planner's prediction for a start."""

    predicted: dict[str, Any] | None  # as in a record; None: no prediction
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An engine's own configuration as the content of a run file, with notes on what the run file does not contain."""

    content: dict[str, Any]
    notes: tuple[str, ...]
    program: str = ""  # whose configuration it is, where the engine is another


@dataclass(frozen=True, kw_only=True)
class FollowedCall:
    """The source that a reader of configurations takes in place of a shell script.

    notes: what of the script was not followed.
    contents: what the script itself states, in the keys of a configuration, by the kind of that configuration.
    """

    source: str
    notes: tuple[str, ...] = ()
    contents: tuple[tuple[str, Mapping[str, Any]], ...] = ()


ASSUMED, DEPRECATED = "assumed:", "deprecated:"
"""Beginnings of notes on values that a configuration lacks, and on keys that its program is giving up."""


def not_estimated(settings: Iterable[str]) -> list[str]:
    """Return the note on `settings` that change the speed or the memory and have no key in a run file; none if empty.

    >>> not_estimated(["--deterministic-mode", "--use-sharp"])
    ['the estimate does not include: --deterministic-mode, --use-sharp']
    """
    named = ", ".join(settings)
    return [f"the estimate does not include: {named}"] if named else []


def is_setting(part: str) -> bool:
    """Return True for `key=value` behind a configuration, False for a file, also one with = in its path."""
    return "=" in part and not is_there(part)


class TrainingEngine(Protocol):
    """The functions that every engine has. Modules implement it."""

    def check(self, run: Run) -> tuple[Unsupported, ...]:
        """Parts of `run` that this engine does not support; empty if it supports all. Pure."""
        ...

    def lower(self, run: Run, *, folder: Path) -> Launch:
        """Return the launch of `run`, whose plan is pinned, with results in `folder`. Pure, and the same everywhere.

        Raises InputError for what `check` refuses.
        """
        ...

    def prepare(self, run: Run, *, options: TrainOptions) -> Start:
        """Decide everything for this machine; write nothing.

        Raises InputError for what `check` refuses, MissingDependencyError when a package or device is absent.
        """
        ...

    def expected(self, start: Any) -> StartPrediction:
        """Return the prediction for `start`, which a dry run prints."""
        ...

    def launch(self, start: Any) -> None:
        """Train on this machine, or as one of the processes of a launcher, until all steps are done."""
        ...

    def read(self, folder: Path) -> Record:
        """Return the record of the training whose results are in `folder`."""
        ...


StatedCluster = str | Mapping[str, Any]
"""A cluster as a run file has it: its name, or a mapping that also states some of its hardware."""


@runtime_checkable
class ImportingEngine(Protocol):
    """An engine whose own configurations are read back."""

    def import_run(self, source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
        """Return the run on `cluster` that `source`, a path or the engine's name of a configuration, describes.

        Every setting is carried over, ignored because it does not concern training, or named in a note. A setting that
        is absent has the engine's default. `ignore`: keys that are not known, which the user left out; an engine whose
        function lacks the argument has none. Raises InputError for what cannot be read or has no place in a run file,
        MissingDependencyError where the engine must be installed to read it.
        """
        ...


@runtime_checkable
class WeightsEngine(Protocol):
    """An engine that keeps its checkpoints in folders of its own and exports their weights."""

    def export_weights(self, run: Run, *, step: int | None, folder: Path, dtype: str) -> Path:
        """Write the weights of a checkpoint of `run` (None: the newest) as safetensors with a config.json.

        `exporting` adds the tokenizer, and the keys of the config.json that came with the weights of the run.
        Returns the checkpoint. Raises InputError where there is none, or `folder` is not empty;
        MissingDependencyError where the engine must be installed.
        """
        ...


@runtime_checkable
class SavedWeightsEngine(Protocol):
    """An engine that keeps its checkpoints in Meshwright's folders, with files of its own.

    The manifests of such checkpoints contain the engine's name under `engine`.
    """

    def export_saved_weights(self, saved: SavedCheckpoint, content: Content, folder: Path, *, dtype: str) -> None:
        """Write the weights of `saved`, a model of the shapes in `content`, as safetensors with a config.json.

        Raises InputError where `folder` is not empty or a tensor is missing.
        """
        ...


@runtime_checkable
class ObservedEngine(Protocol):
    """An engine that reports the events of a training, and opens no data before it says so."""

    takes_warm_up: bool  # False: it has no steps on random tokens, and `warm_up_steps` is 0

    def launch_observed(self, start: Any, *, observer: TrainingObserver, warm_up_steps: int) -> None:
        """Launch as `launch`, with a copy of `observer` in every process.

        `warm_up_steps` steps on random tokens come before the data is opened, and are undone.
        """
        ...


@runtime_checkable
class ExternalProgramsEngine(Protocol):
    """An engine with files for external programs that support more than training here does."""

    def check_export(self, run: Run) -> tuple[Unsupported, ...]:
        """Parts of `run` that these programs do not support either. Pure."""
        ...

    def lower_export(self, run: Run, *, folder: Path) -> Launch:
        """Return the launch of these programs only. Raises InputError for what `check_export` refuses."""
        ...


def find_engine(name: str) -> TrainingEngine:
    """Return the engine called `name`. Raises as `catalog.engine_facts`."""
    return engine_contract(name)


def check_export(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that no program of its engine supports, whether started here or elsewhere."""
    engine = find_engine(run.engine)
    return engine.check_export(run) if isinstance(engine, ExternalProgramsEngine) else engine.check(run)


def pinned_plan(run: Run) -> Plan:
    """Return the plan of `run`, which `lower` needs. Raises InputError where there is none."""
    if run.plan is None:
        raise InputError(
            f"{run.source}: parallel is auto, and nothing can be started without a plan",
            hint="meshwright plan RUN.yaml --write PINNED.yaml pins one",
        )
    if run.is_data_shard_open:
        raise InputError(
            f"{run.source}: parallel.data_shard is what remains of this machine's devices, which only `train` counts",
            hint=f"give it, for example --set parallel.data_shard={run.plan.data_shard}",
        )
    return run.plan


def refuse(engine: str, problems: Iterable[Unsupported], *, hint: str | None = None) -> None:
    """Raise one InputError that lists all `problems`, with their hints and `hint`; return if there is none."""
    problems = tuple(problems)
    if not problems:
        return
    reasons = "; ".join(str(p) for p in problems)
    hints = "; ".join(dict.fromkeys(filter(None, (*(p.hint for p in problems), hint))))
    raise InputError(f"the {engine} engine cannot do this run: {reasons}", hint=hints or None)
