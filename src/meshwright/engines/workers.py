"""Trainings whose steps another program takes: what is decided before, its processes, and what they say meanwhile.

Engines that start a program of somebody else share this: each brings its `Layout`, its `lower` and its own checks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engines import local
from meshwright.engines.base import Launch, Prediction, TrainOptions, Unsupported
from meshwright.engines.outcome import START, STEPS, Layout, compose
from meshwright.errors import InputError, MeshwrightError
from meshwright.specs.plan import Plan
from meshwright.specs.run import Engine, Run

if TYPE_CHECKING:
    from meshwright.specs.hardware import Cluster

CANDIDATES = 50
"""Plans that the planner ranks; the first that the engine runs is taken."""

SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class WorkersStart:
    """A run with its plan, and the machine it was decided for."""

    run: Run  # its plan is pinned
    plan: Plan
    options: TrainOptions
    device_type: str  # as PyTorch calls it
    device_name: str  # as its driver has it
    cluster: Cluster  # as the catalogue has it, or as it was measured
    notes: tuple[str, ...] = ()


def refuse_profile(options: TrainOptions) -> None:
    """Raise InputError where a profile is asked for, which only the native engine writes."""
    if options.profile or options.profile_steps:
        raise InputError("--profile is the native engine's", hint="--set engine=native")


def cluster_here(run: Run, *, device_type: str, num_devices: int) -> Cluster:
    """This machine: the catalogue's device, or one whose rates are measured now, while nothing else runs."""
    import torch

    from meshwright.engines.native import device as devices

    device = torch.device(device_type)
    num_devices = run.plan.num_devices if run.plan else num_devices
    rates = None if devices.known_name(device) else devices.measure_rates(device)
    return devices.cluster_here(device, num_devices=num_devices, rates=rates)


def best_plan(run: Run, *, engine: Engine, problems: Callable[[Plan], list[Unsupported]]) -> Plan:
    """The planner's best plan of those without `problems`; its best of all where none is."""
    from meshwright.planner.choice import best_plans, goal_of
    from meshwright.planner.request import request_for

    run = replace(run, engine=engine)
    ranked = best_plans(request_for(run), goal=goal_of(run), top=CANDIDATES).plans
    possible = [found.plan for found in ranked if not problems(found.plan)]
    return possible[0] if possible else ranked[0].plan


def refuse_devices(plan: Plan, *, device_type: str, num_devices: int) -> None:
    """Raise InputError where this machine alone has too few devices. Processes share a CPU."""
    is_shared = device_type == "cpu" or local.under_launcher()
    if not is_shared and plan.num_devices > num_devices:
        raise InputError(
            "the plan needs more devices than this machine has", got=plan.num_devices,
            allowed=f"<= {num_devices}", hint="start it on all hosts with torchrun",
        )  # fmt: skip


def refuse_checkpoints(run: Run, options: TrainOptions, *, layout: Layout) -> None:
    """A folder with checkpoints is resumed from: only when that was asked for. Raises InputError otherwise."""
    saves = run.train.checkpoint
    if options.resume and saves is None:
        raise InputError(
            "there is nothing to resume from: the run saves no checkpoints", hint="set train.checkpoint"
        )
    if saves is not None and not options.resume and layout.checkpoints(Path(saves.folder)):
        raise InputError(
            f"{saves.folder} already holds checkpoints",
            hint="go on with --resume, or name another folder with --set train.checkpoint.folder=...",
        )


def notes_on_weights(run: Run) -> tuple[str, ...]:
    """What the config.json beside the weights says otherwise than the run. Raises InputError for other weights."""
    if run.weights is None:
        return ()
    from meshwright.engines.native.weights import differences, find_weights

    return tuple(differences(find_weights(run.weights).folder, run.model))


def expected(start: WorkersStart, *, engine: Engine) -> Prediction:
    """What the planner expects of a device that the catalogue knows."""
    if start.run.cluster is None and start.device_type == "cpu":
        words = f"nothing was predicted: {engine.value} on a CPU is not modelled"
        return Prediction(predicted=None, notes=(words,))
    from meshwright.planner.estimate import estimate_plan
    from meshwright.planner.request import request_for

    try:
        request = request_for(replace(start.run, cluster=start.cluster, engine=engine))
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


def launch(start: WorkersStart, lowered: Launch, *, layout: Layout, prediction: Prediction) -> None:
    """One process a device, here or as a launcher has started this one; the record is written at the end."""
    folder, options = start.options.folder, start.options
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        _open_folder(start, lowered, layout=layout, prediction=prediction)
    for left in range(options.max_restarts, -1, -1):
        try:
            local.run(
                lowered,
                folder=folder,
                watch=_Watch(start, layout) if is_main and not options.quiet else lambda: None,
                divides_cores=start.device_type == "cpu",
            )
            break
        except local.ProcessLostError as error:
            if not left:
                raise
            print(f"{error.message}; starting again", file=sys.stderr, flush=True)
    if is_main:
        compose(folder, layout)


def _open_folder(start: WorkersStart, lowered: Launch, *, layout: Layout, prediction: Prediction) -> None:
    """Files of the launch, the resolved run, and what only this process knows."""
    from meshwright.engines.native import telemetry

    folder, options = start.options.folder, start.options
    output = folder / layout.output
    if not options.resume and output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    telemetry.save_run(folder, run=start.run, plan=start.plan)
    local.write_files(lowered, folder)
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

    def __init__(self, start: WorkersStart, layout: Layout) -> None:
        self.start, self.last_s = start, 0.0
        self.path = start.options.folder / layout.output / STEPS
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
