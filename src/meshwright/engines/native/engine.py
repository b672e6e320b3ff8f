"""From a run to a record: the device, the plan, what to expect, the processes.

The contract of `engines.base`:  check(run), train(run, options=...).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from meshwright import catalog
from meshwright.engines.base import Ending, Record, TrainOptions, refuse
from meshwright.engines.native import checkpoint, fp8, hang, telemetry, trackers
from meshwright.engines.native import device as devices
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.metrics import predict, yardstick
from meshwright.engines.native.processes import WorkerLostError, is_restart, run_ranks, under_torchrun
from meshwright.engines.native.progress import Progress
from meshwright.engines.native.trainer import Job, train_rank
from meshwright.engines.native.weights import differences, find_weights
from meshwright.errors import InputError
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run

TOKENS_PER_MICRO_BATCH = {"cpu": 2048, "cuda": 16384}
"""Where nobody says how large a micro-batch is: enough to fill the device, little enough to fit beside the weights."""

TIMEOUT = timedelta(days=1)
"""What processes wait for each other: while the main one tokenises, hours. A step that hangs ends by `--timeout`."""

__all__ = ["check", "prepare", "train"]


def train(run: Run, *, options: TrainOptions, announce: Callable[[Job], None] | None = None) -> Record:
    """Train as `run` says and return the record, which is also in `options.folder`.

    `announce` is told of all that was decided, before the first process starts. Raises InputError for what this
    engine cannot do, MissingDependencyError when the device or a tracker is absent.
    """
    job = prepare(run, options=options)
    _check_checkpoints(run, options)
    if announce is not None:
        announce(job)
    options.folder.mkdir(parents=True, exist_ok=True)
    telemetry.save_run(options.folder, run=run, plan=job.plan)
    again = replace(job, is_restart=True)
    try:
        run_ranks(
            train_rank,
            again if is_restart() else job,
            num_ranks=job.plan.num_devices,
            device_type=devices.find_device().type,
            timeout=TIMEOUT,
            max_restarts=options.max_restarts,
            again=again,
        )
    except WorkerLostError as error:
        if stacks := hang.stacks(options.folder):
            error.hint = f"where the processes stood is in {stacks}; {error.hint}"
        raise
    hang.clear(options.folder)
    return read_record(options.folder)


def prepare(run: Run, *, options: TrainOptions) -> Job:
    """Everything that is decided before the first process starts; writes nothing."""
    refuse("native", check(run))
    trackers.require(run.train.trackers)
    _check_profile(run, options)
    device = devices.find_device()
    if run.cluster is not None:
        devices.require(run.cluster.accelerator.name, device=device)
    fp8.require(run.precision, device=device)
    cluster = run.cluster or _measured(device, options)
    plan = run.plan or plan_here(run, cluster=cluster, device=device)
    refuse("native", check_plan(plan, run=run))
    _require_devices(plan, device)
    weights = None if run.weights is None else find_weights(run.weights)
    notes = [] if weights is None else differences(weights.folder, run.model)
    if run.lora is not None and weights is None:
        notes.append("adapters are trained on random weights: name those to start from with `weights:`")
    notes += fp8.notes(run)
    predicted = predict(run, cluster=cluster, plan=plan)
    if predicted is None:
        notes.append("the planner has no model of this device, so nothing was predicted")
    if run.cluster is None:
        notes.append("the device's rates were measured in seconds before the run, not looked up")
    return Job(
        run=run,
        plan=plan,
        yardstick=yardstick(run, cluster=cluster, plan=plan),
        predicted=predicted,
        options=options,
        device_name=devices.device_name(device),
        accelerator=_catalogued(cluster),
        notes=tuple(notes),
        weights=weights,
    )


def _measured(device: torch.device, options: TrainOptions) -> Cluster:
    progress = Progress(quiet=options.quiet)
    try:
        with progress.phase("measuring this machine"):
            return devices.cluster_here(device)
    finally:
        progress.close()


def _catalogued(cluster: Cluster) -> str | None:
    name = cluster.accelerator.name
    return name if name in catalog.accelerator_names() else None


def plan_here(run: Run, *, cluster: Cluster, device: torch.device) -> Plan:
    """The plan of a run that leaves it open: all devices share the data, and the states where they are several."""
    width = cluster.num_devices
    if run.global_batch % width:
        raise InputError(
            "the global batch does not divide over the devices of this machine", got=run.global_batch,
            allowed=f"a multiple of {width}",
        )  # fmt: skip
    sharding = Sharding.PARAMETERS if width > 1 else Sharding.OPTIMIZER
    per_device = run.global_batch // width
    micro = run.micro_batch or _micro_batch(per_device, run.sequence_length, device)
    if per_device % micro:
        raise InputError(f"batch.micro does not divide the {per_device} sequences of a device", got=micro)
    return Plan(data_shard=width, sharding=sharding, micro_batch=micro)


def _micro_batch(sequences: int, sequence_length: int, device: torch.device) -> int:
    """The largest divisor of a device's sequences within `TOKENS_PER_MICRO_BATCH`."""
    most = max(1, TOKENS_PER_MICRO_BATCH[device.type] // sequence_length)
    return max(size for size in range(1, min(most, sequences) + 1) if sequences % size == 0)


def _check_profile(run: Run, options: TrainOptions) -> None:
    steps = options.profile_steps
    if steps is not None and run.num_steps is not None and steps.last > run.num_steps:
        raise InputError(
            "steps to profile that the run does not take", got=f"{steps.first}:{steps.last}",
            allowed=f"1:{run.num_steps}",
        )  # fmt: skip


def _require_devices(plan: Plan, device: torch.device) -> None:
    """Several processes may share a CPU; each needs a GPU of its own."""
    there = devices.num_devices(device)
    if device.type == "cuda" and not under_torchrun() and plan.num_devices > there:
        raise InputError(
            "the plan needs more devices than this machine has", got=plan.num_devices, allowed=f"<= {there}",
            hint="start it on all hosts with torchrun",
        )  # fmt: skip


def _check_checkpoints(run: Run, options: TrainOptions) -> None:
    settings = run.train.checkpoint
    if options.resume and settings is None:
        raise InputError(
            "there is nothing to resume from: the run saves no checkpoints", hint="set train.checkpoint"
        )
    if settings is None or options.resume or is_restart():
        return
    if found := checkpoint.checkpoints(Path(settings.folder)):
        raise InputError(
            f"{settings.folder} already holds checkpoints, the newest after step {found[-1].step}",
            hint="go on with --resume, or name another folder with --set train.checkpoint.folder=...",
        )


def read_record(folder: Path) -> Record:
    """The record that the main process wrote."""
    values = json.loads((folder / telemetry.RECORD).read_text(encoding="utf-8"))
    record = Record(**values)
    return replace(
        record,
        ending=Ending(record.ending),
        command=tuple(record.command),
        events=tuple(record.events),
        notes=tuple(record.notes),
    )
