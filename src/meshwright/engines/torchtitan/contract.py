"""TorchTitan behind the contract of `engines.base`. Imports no torch but where it looks at this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engines import local
from meshwright.engines.base import RECORD, Launch, Prediction, Record, TrainOptions, read_record, refuse
from meshwright.engines.torchtitan import VERSION, probe
from meshwright.engines.torchtitan.check import check, check_plan
from meshwright.engines.torchtitan.importing import import_run
from meshwright.engines.torchtitan.lower import OUTPUT, lower
from meshwright.engines.torchtitan.probe import Machine
from meshwright.engines.torchtitan.reading import START, STEPS, compose, steps_taken
from meshwright.errors import InputError, MeshwrightError, MissingDependencyError
from meshwright.specs.plan import Plan
from meshwright.specs.run import Engine, Run, StateFormat

if TYPE_CHECKING:
    from meshwright.specs.hardware import Cluster

__all__ = ["check", "expected", "import_run", "launch", "lower", "prepare", "read"]

CANDIDATES = 50
"""Plans that the planner ranks; the first that torchtitan runs is taken."""

SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class TitanStart:
    """A run with its plan, and the machine it was decided for."""

    run: Run  # its plan is pinned
    plan: Plan
    options: TrainOptions
    machine: Machine
    cluster: Cluster  # as the catalogue has it, or as it was measured
    notes: tuple[str, ...] = ()

    @property
    def device_name(self) -> str:
        return self.machine.device_name


def prepare(run: Run, *, options: TrainOptions) -> TitanStart:
    """Decide everything; nothing is written, and no process of the training is started."""
    refuse("torchtitan", check(run))
    if options.profile or options.profile_steps:
        raise InputError("--profile is the native engine's", hint="--set engine=native")
    machine = probe.machine()
    _require_device(run, machine)
    cluster = run.cluster or _cluster_here(run, machine)
    plan = run.plan or _best_plan(replace(run, cluster=cluster))
    refuse("torchtitan", [*check_plan(plan, run=run)])
    _require_plan(plan, machine)
    pinned = replace(run, plan=plan, micro_batch=plan.micro_batch)
    _check_checkpoints(run, options)
    return TitanStart(
        run=pinned, plan=plan, options=options, machine=machine, cluster=cluster, notes=_notes(run)
    )


def _require_device(run: Run, machine: Machine) -> None:
    """What depends on the machine: devices, their formats, and what PyTorch must have."""
    native = "--set engine=native trains on this machine's CPU"
    if not machine.num_devices:
        raise MissingDependencyError(
            f"torchtitan {VERSION} needs an accelerator, and this machine has none that PyTorch can use: "
            "its attention has no backward pass on a CPU", hint=native,
        )  # fmt: skip
    if machine.lacks:
        raise MissingDependencyError(
            f"PyTorch {machine.torch} lacks {', '.join(machine.lacks)}, which torchtitan {VERSION} calls",
            hint="a nightly build of PyTorch has it",
        )
    if machine.device_type == "cpu" and run.precision.matmul == "fp8":
        raise InputError(
            "fp8 needs a GPU of compute capability 8.9 or AMD's gfx942 and newer", hint="precision: bf16"
        )
    if machine.device_type == "cpu" and run.optimizer.states is not StateFormat.FP32:
        raise InputError("optimizer states in bf16 need a GPU", hint="optimizer.states: fp32")


def _require_plan(plan: Plan, machine: Machine) -> None:
    if plan.pipeline > 1 and machine.lacks_in_pipeline:
        raise MissingDependencyError(
            f"PyTorch {machine.torch} lacks {', '.join(machine.lacks_in_pipeline)}, which torchtitan {VERSION} "
            "calls in a pipeline", hint="a nightly build of PyTorch has it",
        )  # fmt: skip
    is_shared = machine.device_type == "cpu" or local.under_launcher()
    if not is_shared and plan.num_devices > machine.num_devices:
        raise InputError(
            "the plan needs more devices than this machine has", got=plan.num_devices,
            allowed=f"<= {machine.num_devices}", hint="start it on all hosts with torchrun",
        )  # fmt: skip


def _cluster_here(run: Run, machine: Machine) -> Cluster:
    """This machine: the catalogue's device, or one whose rates are measured now, while nothing else runs."""
    import torch

    from meshwright.engines.native import device as devices

    device = torch.device(machine.device_type)
    num_devices = run.plan.num_devices if run.plan else machine.num_devices
    rates = None if devices.known_name(device) else devices.measure_rates(device)
    return devices.cluster_here(device, num_devices=num_devices, rates=rates)


def _best_plan(run: Run) -> Plan:
    from meshwright.planner.choice import best_plans, goal_of
    from meshwright.planner.request import request_for

    run = replace(run, engine=Engine.TORCHTITAN)
    ranked = best_plans(request_for(run), goal=goal_of(run), top=CANDIDATES).plans
    possible = [found.plan for found in ranked if not check_plan(found.plan, run=run)]
    return possible[0] if possible else ranked[0].plan


def _check_checkpoints(run: Run, options: TrainOptions) -> None:
    """Torchtitan resumes by itself from what it finds: only when that was asked for."""
    saves = run.train.checkpoint
    if options.resume and saves is None:
        raise InputError(
            "there is nothing to resume from: the run saves no checkpoints", hint="set train.checkpoint"
        )
    if saves is not None and not options.resume and steps_taken(saves.folder):
        raise InputError(
            f"{saves.folder} already holds checkpoints",
            hint="go on with --resume, or name another folder with --set train.checkpoint.folder=...",
        )


def _notes(run: Run) -> tuple[str, ...]:
    if run.weights is None:
        return ()
    from meshwright.engines.native.weights import differences, find_weights

    return tuple(differences(find_weights(run.weights).folder, run.model))


def expected(start: TitanStart) -> Prediction:
    """What the planner expects of a device that the catalogue knows."""
    if start.run.cluster is None and start.machine.device_type == "cpu":
        return Prediction(
            predicted=None, notes=("nothing was predicted: torchtitan on a CPU is not modelled",)
        )
    from meshwright.planner.estimate import estimate_plan
    from meshwright.planner.request import request_for

    try:
        request = request_for(replace(start.run, cluster=start.cluster, engine=Engine.TORCHTITAN))
        estimate = estimate_plan(request, start.plan)
    except MeshwrightError as error:
        return Prediction(predicted=None, notes=(f"nothing was predicted: {error}",))
    step = estimate.step
    predicted: dict[str, Any] = {
        "step": step.step.as_json(),
        "tokens_per_s_per_device": step.tokens_per_s_per_device.as_json(),
        "mfu": step.mfu.as_json(),
        "memory_bytes": step.memory.reserved_bytes,
        "components_s": step.components_s,
        "uncertainty": estimate.uncertainty,
    }
    return Prediction(predicted=predicted)


def launch(start: TitanStart) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end."""
    folder, options = start.options.folder, start.options
    is_main = os.environ.get("RANK", "0") == "0"
    lowered = lower(start.run, folder=folder)
    if is_main:
        _open_folder(start, lowered)
    for left in range(options.max_restarts, -1, -1):
        try:
            local.run(
                lowered,
                folder=folder,
                watch=_Watch(start) if is_main and not options.quiet else lambda: None,
                divides_cores=start.machine.device_type == "cpu",
            )
            break
        except local.ProcessLostError as error:
            if not left:
                raise
            print(f"{error.message}; starting again", file=sys.stderr, flush=True)
    if is_main:
        compose(folder)


def _open_folder(start: TitanStart, lowered: Launch) -> None:
    """Files of the launch, the resolved run, and what only this process knows."""
    from meshwright.engines.native import telemetry

    folder, options = start.options.folder, start.options
    output = folder / OUTPUT
    if not options.resume and output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    telemetry.save_run(folder, run=start.run, plan=start.plan)
    local.write_files(lowered, folder)
    prediction = expected(start)
    known = {
        "command": options.command,
        "started_s": options.started_s,
        "accelerator": asdict(start.cluster.accelerator),
        "predicted": prediction.predicted,
        "notes": (*start.notes, *prediction.notes),
        "git_commit": telemetry.git_commit(Path.cwd()),
    }
    (output / START).write_text(json.dumps(known), encoding="utf-8")


class _Watch:
    """Says now and then how far the training is, from the lines of its step log."""

    def __init__(self, start: TitanStart) -> None:
        self.start, self.last_s = start, 0.0
        self.path = start.options.folder / OUTPUT / STEPS
        self.said = self._last()  # of a training that goes on from here
        self.tokens = start.run.tokens_per_step / start.plan.num_devices

    def __call__(self) -> None:
        if time.monotonic() - self.last_s < SAY_EVERY_S:
            return
        entry = self._last()
        if entry is None or entry == self.said:
            return
        self.last_s, self.said = time.monotonic(), entry
        rate = self.tokens / entry["step_s"]
        words = f"step {entry['step']}/{self.start.run.num_steps}  loss {entry['loss']:.4f}"
        print(f"{words}  {rate:,.0f} tokens/s/device", file=sys.stderr, flush=True)

    def _last(self) -> dict[str, Any] | None:
        """The last whole line of the log."""
        if not self.path.is_file():
            return None
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1]) if whole else None


def read(folder: Path) -> Record:
    """The record of a training that has ended, made of what its processes wrote where nobody has made it yet."""
    return read_record(folder) if (folder / RECORD).is_file() else compose(folder)
