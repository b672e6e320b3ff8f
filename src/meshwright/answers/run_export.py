"""A run as the configuration of an engine: its files, the command that starts them, and the memory of its plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.answers.documents.plan import memory_document
from meshwright.answers.quantities import fit_text
from meshwright.engines.base import ExternalProgramsEngine, Launch, TrainingEngine, check_export, find_engine, refuse
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.choice import notes_on_own_programs, planned
from meshwright.engines.epochs import with_epochs_of_engine
from meshwright.engines.local import with_accelerator_file, write_files
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import PARTIAL
from meshwright.json_values import jsonable
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.result import Result
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.memory_budget import FitVerdict
from meshwright.specs.run import Run
from meshwright.units import format_bytes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunExport(Result):
    """Files of a run for an engine.

    Attributes:
        run: the run with the plan that was exported.
        launch: files, command, environment and number of processes.
        folder: where the files are.
        memory: memory of the plan's fullest device; None where it cannot be estimated.
        notes: cautions for the reader.
    """

    run: Run
    launch: Launch
    folder: Path
    memory: MemoryEstimate | None
    notes: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command for each host, with torchrun if there are several processes; where nodes have other numbers of
        devices a line for the hosts of each part."""
        assignments = [f"{name}={value}" for name, value in self.launch.env.items()]
        if self.launch.num_processes == 1:
            return shlex.join([*assignments, *self.launch.argv])
        cluster = self.run.cluster
        num_nodes = 1 if cluster is None else cluster.num_nodes
        where = [] if num_nodes == 1 else [f"--nnodes={num_nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]

        def on(each: int) -> str:
            return shlex.join([*assignments, "torchrun", f"--nproc-per-node={each}", *where, *self.launch.argv[1:]])

        if cluster is None or len(cluster.node_sizes) == 1:
            return on(self.launch.num_processes // num_nodes)
        return "\n".join(f"{on(part.devices_per_node)}  # hosts of {part.name}" for part in cluster.parts)

    def to_dict(self) -> dict[str, Any]:
        launch = self.launch
        return jsonable(
            {
                "engine": self.run.engine,
                "plan": self.run.plan,
                "memory": memory_document(self.memory) if self.memory else None,
                "files": sorted(launch.files),
                "folder": self.folder,
                "argv": launch.argv,
                "env": launch.env,
                "num_processes": launch.num_processes,
                "notes": self.notes,
            }
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each file."""
        return [{"file": str(self.folder / name)} for name in sorted(self.launch.files)]

    def summary(self) -> str:
        """Return run, model, engine and plan."""
        assert self.run.plan is not None
        return f"{self.run.name}: {self.run.model.name} with {self.run.engine}, {self.run.plan.describe()}"


def export_run(run: Run, folder: Path) -> RunExport:
    """Write `run` for its engine, which need not be installed, to a new or empty folder.

    Raises InputError for what the engine refuses, or where `folder` is not empty or cannot be written.
    """
    run, counted = with_epochs_of_engine(run)
    refuse(run.engine, check_export(run))
    run = planned(run, is_export=True)
    launch, notes = _lowered(find_engine(run.engine), run, folder)
    launch = with_accelerator_file(launch, run)
    try:
        for path in folder.rglob("*"):  # files of this export are what a killed one left
            ours = launch.files.get(str(path.relative_to(folder)))
            if path.is_file() and path.suffix != PARTIAL and path.read_bytes() != (ours and ours.encode()):
                raise InputError("the folder is not empty", got=str(folder), hint="name a new one")
        write_files(launch, folder)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    memory, cautions = plan_memory(run)
    notes += [*([counted] if counted else []), *note_on_switches(run, is_export=True), *cautions]
    return RunExport(run=run, launch=launch, folder=folder, memory=memory, notes=tuple(notes))


def _lowered(engine: TrainingEngine, run: Run, folder: Path) -> tuple[Launch, list[str]]:
    """The launch of the run; if only other programs of the engine can train it, their launch, and a note."""
    if not engine.check(run) or not hasattr(engine, "lower_export"):
        return engine.lower(run, folder=folder), []
    launch = cast("ExternalProgramsEngine", engine).lower_export(run, folder=folder)
    return launch, [*notes_on_own_programs(run)]


def plan_memory(run: Run) -> tuple[MemoryEstimate | None, list[str]]:
    """Return the memory of the run's plan, None where there is none to estimate, and cautions about it."""
    if run.cluster is None or run.plan is None:
        return None, []
    try:
        memory = estimate_plan(request_for(run), run.plan).step.memory
    except MeshwrightError as error:
        return None, [f"nothing was estimated: {error.message}"]
    if memory.verdict is FitVerdict.MAY_FIT:
        return memory, [f"the plan {fit_text(memory)}: {_needed(memory)}"]
    return memory, [] if memory.fits else [f"the plan does not fit: {_needed(memory)}"]


def _needed(memory: MemoryEstimate) -> str:
    needed, there = format_bytes(memory.reserved_bytes), format_bytes(memory.usable_bytes)
    return f"stage {memory.stage} needs {needed}; a plan may reserve {there} of a device"
