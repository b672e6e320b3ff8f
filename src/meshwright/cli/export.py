"""`meshwright export`: a run as the configuration of another engine, which need not be installed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import cast

from meshwright.answers.quantities import fit_text
from meshwright.cli.output import emit_json, note, print_line
from meshwright.cli.run_input import run_from
from meshwright.engines.base import ExternalProgramsEngine, Launch, TrainingEngine, check_export, find_engine, refuse
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.choice import planned
from meshwright.engines.local import write_files
from meshwright.errors import InputError, MeshwrightError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.memory_budget import FitVerdict
from meshwright.specs.run import Run
from meshwright.units import format_bytes


def run(
    *,
    run_path: Path,
    engine_name: str | None,
    folder: Path,
    overrides: tuple[str, ...],
    calibration: str | None,
    as_json: bool,
) -> None:
    """Write the configuration to a new folder, and print the command that starts it."""
    run = run_from(run_path, engine=engine_name, calibration=calibration, overrides=overrides)
    refuse(run.engine, check_export(run))
    run = planned(run, is_export=True)
    launch, notes = _lowered(find_engine(run.engine), run, folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("the folder is not empty", got=str(folder), hint="name a new one")
    try:
        write_files(launch, folder)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    notes += [*note_on_switches(run, is_export=True), *lint(run)]
    if as_json:
        document = {
            "engine": run.engine, "plan": run.plan, "files": sorted(launch.files), "folder": folder,
            "argv": launch.argv, "env": launch.env, "num_processes": launch.num_processes, "notes": notes,
        }  # fmt: skip
        emit_json(document)
        return
    assert run.plan is not None
    print_line(f"{run.name}: {run.model.name} with {run.engine}, {run.plan.describe()}", style="bold")
    for name in sorted(launch.files):
        print_line(f"  {folder / name}")
    print_line()
    print_line("Start it on every host:")
    print(f"  {start_command(launch, run=run)}")
    for caution in notes:
        note(caution)


def _lowered(engine: TrainingEngine, run: Run, folder: Path) -> tuple[Launch, list[str]]:
    """The launch of the run; if only other programs of the engine can train it, their launch, and a note."""
    problems = engine.check(run)
    if not problems or not hasattr(engine, "lower_export"):
        return engine.lower(run, folder=folder), []
    reasons = "; ".join(map(str, problems))
    note = f"for the engine's own programs alone, `train` cannot do it: {reasons}"
    return cast("ExternalProgramsEngine", engine).lower_export(run, folder=folder), [note]


def start_command(launch: Launch, *, run: Run) -> str:
    """The command for each host, with torchrun if there are several processes."""
    assignments = [f"{name}={value}" for name, value in launch.env.items()]
    if launch.num_processes == 1:
        return shlex.join([*assignments, *launch.argv])
    num_nodes = 1 if run.cluster is None else run.cluster.num_nodes
    torchrun = ["torchrun", f"--nproc-per-node={launch.num_processes // num_nodes}"]
    if num_nodes > 1:
        torchrun += [f"--nnodes={num_nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    return shlex.join([*assignments, *torchrun, *launch.argv[1:]])


def lint(run: Run) -> list[str]:
    """Problems that `estimate` finds in the plan: that it does not fit, or cannot be estimated."""
    if run.cluster is None or run.plan is None:
        return []
    try:
        memory = estimate_plan(request_for(run), run.plan).step.memory
    except MeshwrightError as error:
        return [f"nothing was estimated: {error.message}"]
    if memory.verdict is FitVerdict.MAY_FIT:
        return [f"the plan {fit_text(memory)}: {_needed(memory)}"]
    return [] if memory.fits else [f"the plan does not fit: {_needed(memory)}"]


def _needed(memory: MemoryEstimate) -> str:
    needed, there = format_bytes(memory.reserved_bytes), format_bytes(memory.usable_bytes)
    return f"stage {memory.stage} needs {needed}; a plan may reserve {there} of a device"
