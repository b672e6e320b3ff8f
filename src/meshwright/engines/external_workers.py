"""Trainings by processes of another program: decisions before the start, the processes, and progress messages.

Shared by all engines that start an external program. Each provides its `OutputLayout`, its `lower` and its own checks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.engines import local
from meshwright.engines.base import Launch, StartPrediction, TrainOptions, Unsupported, predicted, refuse
from meshwright.engines.beginning import begin
from meshwright.engines.choice import planned, with_devices_here
from meshwright.engines.external_record import START, STEPS, OutputLayout, compose
from meshwright.engines.folders import clear_results
from meshwright.engines.observer import TrainingObserver, observer_variable
from meshwright.errors import InputError, MeshwrightError, printable
from meshwright.files import write_atomically
from meshwright.json_values import parse_json
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.machine import Machine
from meshwright.training.profiling.steps import FOLDER, VARIABLE, ProfileSteps, steps_to_profile
from meshwright.training.rendezvous import is_restart, launched_processes
from meshwright.training.run_identity import IDENTITY, RunIdentity, identity_file, write_identity

if TYPE_CHECKING:
    from meshwright.specs.hardware import Cluster
    from meshwright.training.data import Corpus

PROGRESS_INTERVAL_S = 10.0
NOT_PROFILED = "the steps to profile were taken before: nothing is profiled"


NotesOnData: TypeAlias = "Callable[[Run, Corpus], Iterable[str]]"
"""Notes on what an engine does with the data of a run."""


@dataclass(frozen=True, kw_only=True)
class WorkersStart:
    """A run with its plan, and the machine for which the plan was chosen."""

    run: Run  # with a pinned plan
    plan: Plan
    options: TrainOptions
    engine: str
    layout: OutputLayout
    device_type: str  # in PyTorch
    device_name: str  # in its driver
    cluster: Cluster  # of the catalogue, or measured
    identity: RunIdentity
    profiled: ProfileSteps | None = None  # the steps that its processes profile
    observer: TrainingObserver | None = None  # of its processes, which then open the data before any other does
    is_one_process: bool = False  # one process with all devices of the plan, as virtual devices of a CPU
    notes: tuple[str, ...] = ()

    @property
    def num_processes(self) -> int:
        """One per device, or one for all devices."""
        return 1 if self.is_one_process else self.plan.num_devices


def refuse_profile(options: TrainOptions) -> None:
    """Raise InputError if a profile is requested, for an engine whose processes do not profile their steps."""
    if options.is_profiled:
        raise InputError("this engine does not support --profile", hint="--set engine=native")


def refuse_absent_steps(run: Run, options: TrainOptions) -> None:
    """Raise InputError if steps are to be profiled that the run does not take."""
    steps = options.profile_steps
    if steps is not None and run.num_steps is not None and steps.last > run.num_steps:
        raise InputError("steps to profile that the run does not take", got=str(steps), allowed=f"1:{run.num_steps}")


def start(
    run: Run,
    *,
    options: TrainOptions,
    engine: str,
    machine: Machine,
    check_plan: Callable[..., Sequence[Unsupported]],
    layout: OutputLayout,
    file_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> WorkersStart:
    """Decide everything that remains after `engine` has checked the run and detected `machine`.

    `check_plan(plan, run=run)` returns the parts of a plan that the engine does not support. `file_shapes` are the
    shapes of the weight tensors by name; None: those that the native engine reads. Raises InputError for unsupported
    plans, for too few devices and for a folder that already contains checkpoints.
    """
    from meshwright.training.data import require_sources
    from meshwright.training.device import notes_on_name

    require_sources(run)
    refuse_absent_steps(run, options)
    run = with_devices_here(run, num_devices=launched_processes() or machine.num_devices)
    cluster = run.cluster or cluster_here(run, machine)
    plan = planned(replace(run, cluster=cluster, engine=engine)).plan
    assert plan is not None
    refuse(engine, check_plan(plan, run=run))
    refuse_devices(plan, device_type=machine.device_type, num_devices=machine.num_devices)
    refuse_checkpoints(run, options, newest_step=layout.newest_step)
    require_indices(run, layout)
    begun = begin(run, plan=plan, options=options, newest_step=layout.newest_step)
    # The batches of other programs begin at multiples of their size.
    shift = begun.misplaced_sequences
    what = "are trained on again" if shift > 0 else "are left out"
    shifted = f"the next batch begins at a multiple of its new size: {abs(shift):,} sequences of the data {what}"
    profiled = None  # none was asked for, or all were taken before
    if options.is_profiled:
        assert begun.run.num_steps is not None  # every engine refuses a run without
        profiled = steps_to_profile(options.profile_steps, done=begun.step, num_steps=begun.run.num_steps)
    return WorkersStart(
        run=replace(begun.run, plan=plan, micro_batch=plan.micro_batch),
        plan=plan,
        options=options,
        engine=engine,
        layout=layout,
        device_type=machine.device_type,
        device_name=machine.device_name,
        cluster=cluster,
        identity=begun.resumed(),
        profiled=profiled,
        notes=(
            *begun.notes,
            *([shifted] if shift else []),
            *notes_on_weights(run, file_shapes),
            *notes_on_name(machine.device_name, device_type=machine.device_type, cluster=run.cluster),
            *([NOT_PROFILED] if options.is_profiled and profiled is None else []),
        ),
    )


def require_indices(run: Run, layout: OutputLayout) -> None:
    """Raise InputError if the index of the newest checkpoint, which a program reads as a pickle, is not a plain one."""
    from meshwright.training.checkpoints.metadata import require_index

    saves = run.train.checkpoint
    for path in [] if saves is None else layout.checkpoints(Path(saves.folder).expanduser())[-1:]:
        require_index(path)


def cluster_here(run: Run, machine: Machine) -> Cluster:
    """Return this machine as a cluster: its device is of the catalogue, or its rates are measured now."""
    import torch

    from meshwright.training import device as devices

    device = torch.device(machine.device_type)
    num_devices = run.plan.num_devices if run.plan else machine.num_devices
    rates = None if devices.catalog_name(device) else devices.measure_rates(device)
    return devices.cluster_here(device, num_devices=num_devices, rates=rates)


def refuse_devices(plan: Plan, *, device_type: str, num_devices: int) -> None:
    """Raise InputError if the plan has more devices than this machine. A CPU runs any number of processes."""
    is_unlimited = device_type == "cpu" or local.under_launcher()
    if not is_unlimited and plan.num_devices > num_devices:
        raise InputError(
            "the plan needs more devices than this machine has", got=plan.num_devices,
            allowed=f"<= {num_devices}", hint="start it on all hosts with torchrun",
        )  # fmt: skip


def refuse_checkpoints(run: Run, options: TrainOptions, *, newest_step: Callable[[Path], int | None]) -> None:
    """Raise InputError if the run's folder contains checkpoints and `--resume` was not given.

    `newest_step(folder)` is the step of the newest checkpoint in a folder; None: there is none.
    """
    saves = run.train.checkpoint
    if options.resume and saves is None and not is_restart():
        raise InputError("there is nothing to resume from: the run saves no checkpoints", hint="set train.checkpoint")
    if saves is None or options.resume:
        return
    step = newest_step(Path(saves.folder))
    if step is not None:
        raise InputError(
            f"{saves.folder} already holds checkpoints, the newest after step {step}",
            hint="continue with --resume, start a new run from its weights with --branch, or name another folder "
            "with --set train.checkpoint.folder=...",
        )


def notes_on_weights(run: Run, shapes: Mapping[str, tuple[int, ...]] | None) -> tuple[str, ...]:
    """Differences between the config.json of the weights and the run. Raises InputError for weights that do not fit."""
    if run.weights is None:
        return ()
    from meshwright.training.weights import differences, find_weights

    folder, length = find_weights(run.weights).folder, run.sequence_length
    return tuple(differences(folder, run.model, shapes=shapes, sequence_length=length))


def expected(start: WorkersStart) -> StartPrediction:
    """Return the planner's prediction, if the catalogue contains the device."""
    if start.run.cluster is None and start.device_type == "cpu":
        note = f"nothing was predicted: {start.engine} on a CPU is not modelled"
        return StartPrediction(predicted=None, notes=(note,))
    from meshwright.planner.estimate import estimate_plan
    from meshwright.planner.request import request_for

    try:
        request = request_for(replace(start.run, cluster=start.cluster, engine=start.engine))
        estimate = estimate_plan(request, start.plan)
    except MeshwrightError as error:
        return StartPrediction(predicted=None, notes=(f"nothing was predicted: {error}",))
    return StartPrediction(predicted=predicted(estimate, memory_bytes=estimate.step.memory.reserved_bytes))


def observed(start: WorkersStart, observer: TrainingObserver, *, warm_up_steps: int) -> WorkersStart:
    """Return `start` with an observer. Raises InputError for steps on random tokens, which other programs lack."""
    if warm_up_steps:
        raise InputError(f"{start.engine} takes no warm-up steps on random tokens", got=warm_up_steps, allowed=0)
    return replace(start, observer=observer)


def launch(start: WorkersStart, lowered: Launch, *, notes_on_data: NotesOnData = lambda run, corpus: ()) -> None:
    """Train with one process per device, or as the process of a launcher; then write the record."""
    folder, options = start.options.folder, start.options
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        _open_folder(start, lowered, notes_on_data)
        for line in () if options.quiet else start.notes:
            print(printable(f"note: {line}"), file=sys.stderr, flush=True)
    if start.profiled is not None:
        lowered = replace(lowered, env={**lowered.env, VARIABLE: str(start.profiled)})
    if start.observer is not None:
        lowered = replace(lowered, env={**lowered.env, **observer_variable(start.observer)})
    for left in range(options.max_restarts, -1, -1):
        try:
            local.run(
                lowered,
                folder=folder,
                watch=_ProgressPrinter(start) if is_main and not options.quiet else lambda: None,
                splits_cores=start.device_type == "cpu",
            )
            break
        except local.ProcessLostError as error:
            if not left or error.was_asked_to_stop:
                raise
            print(printable(f"{error.message}; starting again"), file=sys.stderr, flush=True)
    if is_main:
        compose(folder, start.layout)


def _open_folder(start: WorkersStart, lowered: Launch, notes_on_data: NotesOnData) -> None:
    """Write the files of the launch, the resolved run and the decisions of this process."""
    from meshwright.training import telemetry

    opens_data = start.observer is None and not local.under_launcher()
    usage, data_notes = _open_data(start, notes_on_data) if opens_data else (None, ())
    folder, options, prediction = start.options.folder, start.options, expected(start)
    output = folder / start.layout.output
    if not (options.resume or is_restart()):
        clear_results(folder)
        shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)  # of the steps before a resume
    output.mkdir(parents=True, exist_ok=True)
    telemetry.save_run(folder, run=start.run, plan=start.plan)
    save_identity(start.run, start.identity, folder=folder)
    local.write_files(lowered, folder)
    known = {
        "command": options.command,
        "started_s": options.started_s,
        "accelerator": asdict(start.cluster.accelerator),
        "predicted": prediction.predicted,
        "notes": (*start.notes, *data_notes, *prediction.notes),
        "git_commit": telemetry.git_commit(Path.cwd()),
        "data_usage": usage,
        "profiled": None if start.profiled is None else str(start.profiled),
    }
    write_atomically(output / START, json.dumps(known))


def save_identity(run: Run, identity: RunIdentity, *, folder: Path) -> None:
    """Write the identity to the folder of results and beside the checkpoints."""
    write_identity(folder / IDENTITY, identity)
    if run.train.checkpoint is not None:
        write_identity(identity_file(Path(run.train.checkpoint.folder)), identity)


def _open_data(start: WorkersStart, notes_on_data: NotesOnData) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Tokenise the data before the processes start; the counts of its labels and padding, and the engine's notes on it.

    Raises InputError for data that cannot be trained on. Under a launcher the processes check it themselves.
    """
    from meshwright.training.data import open_data

    corpus = open_data(start.run)
    notes = tuple(notes_on_data(start.run, corpus))
    if not start.options.quiet:
        run = start.run
        num_sequences = (run.num_steps or 0) * run.global_batch
        for line in (
            *notes,
            *corpus.notes,
            *corpus.planned_epochs(num_steps=run.num_steps, num_sequences=num_sequences),
        ):
            print(printable(f"note: {line}"), file=sys.stderr, flush=True)
    return corpus.usage, notes


class _ProgressPrinter:
    """Prints the newest line of the step log every `PROGRESS_INTERVAL_S` seconds."""

    def __init__(self, start: WorkersStart) -> None:
        self.start, self.last_s = start, 0.0
        self.path = start.options.folder / start.layout.output / STEPS
        self.printed = self._last()  # of a training that is resumed
        self.tokens = start.run.tokens_per_step / start.plan.num_devices

    def __call__(self) -> None:
        if time.monotonic() - self.last_s < PROGRESS_INTERVAL_S:
            return
        entry = self._last()
        if entry is None or entry == self.printed:
            return
        self.last_s, self.printed = time.monotonic(), entry
        rate = self.tokens / entry["step_s"]
        progress = f"step {entry['step']}/{self.start.run.num_steps}  loss {entry['loss']:.4f}"
        print(f"{progress}  {rate:,.0f} tokens/s/device", file=sys.stderr, flush=True)

    def _last(self) -> dict[str, Any] | None:
        """Return the last complete line of the log."""
        if not self.path.is_file():
            return None
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return parse_json(whole[-1]) if whole else None
