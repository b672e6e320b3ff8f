"""Prepare and launch a training: device, plan, expected times, processes. `contract` exposes it to the commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from meshwright.catalog import lookup as catalog
from meshwright.engines import external_workers
from meshwright.engines.base import Measuring, TrainOptions, refuse
from meshwright.engines.beginning import begin
from meshwright.engines.choice import planned, with_devices_here
from meshwright.engines.folders import clear_results
from meshwright.engines.native import compiling, fp8, kernel_routing
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.expectation import Expectation, measure_expectation
from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.trainer import train_rank
from meshwright.kernels.dispatch import using as using_routes
from meshwright.records.training import Ending, Record, read_record
from meshwright.specs.hardware import HERE
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import NATIVE, KernelChoices, Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training import device as devices
from meshwright.training import gemm_tuning, optimizer_updates, telemetry, trackers, watchdog
from meshwright.training.conversion import notes_on_base
from meshwright.training.data import require_sources
from meshwright.training.gemm_tuning import GemmChoices
from meshwright.training.optimizer import learning_rate
from meshwright.training.processes import WorkerLostError, run_ranks
from meshwright.training.rendezvous import is_main, is_restart, launched_processes, under_launcher
from meshwright.training.step_gemms import count_gemms
from meshwright.training.weights import differences, find_weights

TIMEOUT = timedelta(days=1)
"""Timeout of collectives. The main process may tokenise for hours; a step that hangs ends by `--timeout`."""

__all__ = ["check", "expected", "expected_of", "launch", "plan_here", "prepare", "read_record", "train"]


def train(run: Run, *, options: TrainOptions) -> Record:
    """Train `run` and return the record, which is also in `options.folder`. See `prepare` and `launch`."""
    launch(prepare(run, options=options))
    return read_record(options.folder)


def launch(prepared: PreparedRun) -> None:
    """Train until all steps are taken; the record is then in the folder of the results.

    A resumed training that has taken them, and whose record says so, is left as it is.
    Raises InputError where checkpoints are in the way, WorkerLostError when a process was lost.
    """
    options = prepared.options
    if options.resume and _is_done(prepared):
        if not options.quiet:
            steps = f"all {prepared.run.num_steps:,} steps were taken"
            print(f"note: {steps}: nothing is left to do", file=sys.stderr, flush=True)
        return
    if not under_launcher():
        _open_folder(prepared)
    try:
        run_ranks(
            _train_launched if under_launcher() else train_rank,
            prepared,
            num_ranks=prepared.plan.num_devices,
            device_type=devices.find_device().type,
            timeout=TIMEOUT,
            max_restarts=options.max_restarts,
            restart_payload=replace(prepared, is_restart=True),
        )
    except WorkerLostError as error:
        if stacks := watchdog.stacks(options.folder):
            error.hint = f"the stacks of the processes are in {stacks}; {error.hint}"
        raise
    watchdog.clear(options.folder)


def _is_done(prepared: PreparedRun) -> bool:
    """True if the newest checkpoint and the record are of the last step. Raises InputError for a damaged checkpoint."""
    saves, folder = prepared.run.train.checkpoint, prepared.options.folder
    if saves is None or prepared.is_restart or _newest_step(Path(saves.folder)) != prepared.run.num_steps:
        return False
    try:
        record = read_record(folder)
    except (OSError, ValueError, TypeError):
        return False
    if record.ending is not Ending.DONE or record.statistics.get("steps") != prepared.run.num_steps:
        return False
    checkpoint.newest(Path(saves.folder))
    return True


def _train_launched(rank: int, num_ranks: int, prepared: PreparedRun) -> None:
    """Train as a process of a launcher: only together do processes know whether this is a restart."""
    _open_folder(prepared)
    train_rank(rank, num_ranks, prepared)


def _newest_step(folder: Path) -> int | None:
    found = checkpoint.checkpoints(folder)
    return found[-1].step if found else None


def _open_folder(prepared: PreparedRun) -> None:
    """Raise InputError where checkpoints are in the way; else write the resolved run to the folder."""
    if not prepared.is_restart:
        external_workers.refuse_checkpoints(prepared.run, prepared.options, newest_step=_newest_step)
        if not prepared.options.resume and is_main():
            clear_results(prepared.options.folder)
    prepared.options.folder.mkdir(parents=True, exist_ok=True)
    telemetry.save_run(prepared.options.folder, run=prepared.run, plan=prepared.plan)


def prepare(run: Run, *, options: TrainOptions) -> PreparedRun:
    """Decide everything that precedes the first process; writes nothing."""
    refuse("native", check(run))
    trackers.require(run.train.trackers)
    require_sources(run)
    external_workers.refuse_absent_steps(run, options)
    device = devices.find_device()
    if run.cluster is not None and run.cluster_name != HERE:
        devices.require(run.cluster.accelerator.name, device=device)
    fp8.require(run.precision, device=device)
    optimizer_updates.require(run.optimizer)
    compiling.require(run, device=device)
    run = with_devices_here(run, num_devices=_num_devices(device))
    chosen, asked = planned_here(run, device=device), run.kernels
    run, plan = replace(run, kernels=chosen.kernels, overrides=chosen.overrides), chosen.plan
    assert plan is not None
    refuse("native", check_plan(plan, run=run))
    external_workers.refuse_devices(plan, device_type=device.type, num_devices=devices.num_devices(device))
    weights = None if run.weights is None else find_weights(run.weights)
    length, new_rows, notes = run.sequence_length, run.data.new_rows, []
    if weights is not None:
        notes = differences(weights.folder, run.model, sequence_length=length, new_rows=new_rows)
    if run.lora is not None and weights is None:
        notes.append("adapters are trained on random weights: name those to start from with `weights:`")
    notes += () if run.lora is None else notes_on_base(run.lora.base_format)
    if run.num_steps and not learning_rate(run.optimizer, step=run.num_steps - 1, num_steps=run.num_steps):
        notes.append("the learning rate of the last step is 0, which changes nothing: optimizer.final_ratio is 0")
    notes += _notes_on_kernels(asked, run.kernels)
    notes += fp8.notes(run, plan, device=device)
    notes += devices.notes_on_name(devices.device_name(device), device_type=device.type, cluster=run.cluster)
    choices, choice_notes = _gemm_choices(run, plan, device=device)
    kernel_routing.require(run, device=device)
    if not (is_restart() or under_launcher()):
        external_workers.refuse_checkpoints(run, options, newest_step=_newest_step)
    begun = begin(run, plan=plan, options=options, newest_step=_newest_step)
    return PreparedRun(
        run=begun.run,
        plan=plan,
        options=options,
        device_name=devices.device_name(device),
        identity=begun.identity,
        accelerator=_catalog_name(run, device),
        notes=(*notes, *choice_notes, *begun.notes),
        weights=weights,
        gemm_choices=choices,
    )


def _notes_on_kernels(asked: KernelChoices, planned: KernelChoices) -> list[str]:
    """Notes on what the planner changed so that its plan fits, or because memory is left."""
    changes = []
    if planned.stored_activations != asked.stored_activations:
        stored = ", ".join(f"{module}: {kind}" for module, kind in planned.stored_activations.items())
        changes.append(f"stored_activations: {{{stored}}}, which rounds gradients ({{}} forbids it)")
    if planned.weight_cache != asked.weight_cache:
        changes.append(f"weight_cache: {planned.weight_cache}")
    notes = [f"the planner's best plan fits with kernels.{change}" for change in changes]
    if planned.loss_chunk != asked.loss_chunk:
        notes.append(f"the planner's best plan has memory left for kernels.loss_chunk: {planned.loss_chunk}")
    return notes


def _gemm_choices(run: Run, plan: Plan, *, device: torch.device) -> tuple[GemmChoices | None, tuple[str, ...]]:
    """The tuned threads and kernels of the run's GEMMs, and a note of them."""
    if run.gemm_tuning is None:
        return None, ()
    found, own = gemm_tuning.load(run.gemm_tuning), count_gemms(run, plan)
    gemm_tuning.require(found, device=device, plan=plan, gemms=own, name=run.gemm_tuning)
    return found.choices, (f"GEMMs as in {run.gemm_tuning}: {found.choices.describe(own)}",)


def expected(prepared: PreparedRun) -> Expectation:
    """Step time and memory to expect of `prepared`, measured in this process only."""
    routing = kernel_routing.routing_of(prepared.run, device=devices.find_device())
    with gemm_tuning.using(prepared.gemm_choices, devices.find_device()), using_routes(routing):
        return expected_of(prepared.run, plan=prepared.plan, measuring=prepared.options.measuring)


def expected_of(run: Run, *, plan: Plan, measuring: Measuring = Measuring.ONCE) -> Expectation:
    """Step time and memory to expect of `plan`, measured in this process with its part of a CPU's threads."""
    device = devices.find_device()
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // plan.num_devices))
    try:
        return measure_expectation(run, plan=plan, device=device, measuring=measuring)
    finally:
        torch.set_num_threads(threads)


def _catalog_name(run: Run, device: torch.device) -> str | None:
    """The catalogue's name of the devices of this run; None where it has none."""
    if run.cluster is None:
        return devices.catalog_name(device)
    name = run.cluster.accelerator.name
    return name if name in catalog.accelerator_names() else None


def plan_here(run: Run, *, device: torch.device) -> Plan:
    """The plan of `planned_here`."""
    plan = planned_here(run, device=device).plan
    assert plan is not None
    return plan


def planned_here(run: Run, *, device: torch.device) -> Run:
    """The run with its plan, or the planner's best that this engine runs, for its cluster or this machine's devices.

    Nothing is measured for it, so that all processes of a launcher come to the same plan.
    """
    run = with_devices_here(run, num_devices=_num_devices(device))
    if run.plan is not None:
        return run
    cluster = run.cluster or devices.cluster_here(device, num_devices=_num_devices(device), rates=None)
    # A device that emulates a format is not in the catalogue with its rate: the plan is that of bf16.
    precision = PRECISIONS["bf16"] if fp8.is_emulated(run.precision, device=device) else run.precision
    chosen = planned(replace(run, cluster=cluster, engine=NATIVE, precision=precision))
    return replace(
        run, plan=chosen.plan, micro_batch=chosen.micro_batch, kernels=chosen.kernels, overrides=chosen.overrides
    )


def _num_devices(device: torch.device) -> int:
    """Devices that a plan may use: one for each process of a launcher; without a launcher, all of this machine."""
    return launched_processes() or devices.num_devices(device)
