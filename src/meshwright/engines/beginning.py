"""First decision of every engine: a new run, or the run of its checkpoints resumed. Imports no tensor framework.

`begin` compares the run with the newest checkpoint before any process starts. Differences that would train something
else are refused together; others are noted (`training.run_identity`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.catalog.stacks import notes_on_framework, switches_of
from meshwright.engines.base import TrainOptions
from meshwright.engines.software_line import note_on_left_switches, switches_without_setting
from meshwright.errors import InputError
from meshwright.planner.engines import engine_facts
from meshwright.specs.features import Preset
from meshwright.specs.plan import Plan
from meshwright.specs.run import NATIVE, Run
from meshwright.training import run_identity
from meshwright.training.rendezvous import is_restart, under_launcher


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The run as it is trained, and its identity."""

    run: Run
    identity: run_identity.RunIdentity  # of the run as given, before it continues another one
    held: run_identity.RunIdentity | None = None  # of the newest checkpoint
    step: int = 0  # of the newest checkpoint
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def resumed(self) -> run_identity.RunIdentity:
        """The identity from here on, for an engine whose batches begin at multiples of their size."""
        return replace(self._continued(), sequence_offset=0)

    @property
    def misplaced_sequences(self) -> int:
        """Sequences that such an engine trains on again because the batch has changed; negative: leaves out."""
        return self._continued().sequence_offset

    def _continued(self) -> run_identity.RunIdentity:
        if self.held is None:
            return self.identity
        return run_identity.continued(self.held, self.identity, step=self.step, batch=self.step, changes=self.changes)


def begin(run: Run, *, plan: Plan, options: TrainOptions, newest_step: Callable[[Path], int | None]) -> Beginning:
    """Compare `run` with the newest checkpoint in its folder, where it resumes one.

    `newest_step(folder)` is the step of the newest checkpoint; None: there is none. Raises InputError that names every
    difference if the checkpoint is of another run, or the folder of results is.
    """
    found = _begin(run, plan=plan, options=options, newest_step=newest_step)
    return replace(found, notes=(*note_on_switches(run), *found.notes))


def _begin(run: Run, *, plan: Plan, options: TrainOptions, newest_step: Callable[[Path], int | None]) -> Beginning:
    saves = run.train.checkpoint
    contents = {}
    if saves is not None:
        from meshwright.training.fingerprints import fingerprints  # imports PyTorch; planning comes here too

        contents = fingerprints(run)
    identity = run_identity.new_identity(run, plan=plan, results=options.folder, fingerprints=contents)
    if saves is None or not (options.resume or is_restart() or under_launcher()):
        return Beginning(run=run, identity=identity, notes=_note_on_branch(run, identity))
    folder = Path(saves.folder).expanduser()
    step = newest_step(folder)
    if step is None:
        return Beginning(run=run, identity=identity)
    held = run_identity.identity_in(folder)
    if held is None:
        note = f"the checkpoints in {folder} do not say of which run they are: nothing was compared"
        return Beginning(run=run, identity=identity, notes=(note,))
    found = run_identity.compare(held, identity)
    if found.refused:
        raise InputError(
            f"the checkpoint ({folder}, after step {step}) is of another run: {'; '.join(found.refused)}",
            hint="--branch (branch=True in Python) starts a new run from its weights; to resume, restore them",
        )
    there = run_identity.read_identity(options.folder / run_identity.IDENTITY)
    if there is not None and held.run_id and there.run_id != held.run_id:
        raise InputError(
            "the folder of results is of another run than the checkpoint", got=str(options.folder),
            allowed=held.results, hint="leave --out away, or name a new folder",
        )  # fmt: skip
    begun = _with_steps(run, held, step=step, folder=folder)
    if options.resume:
        _refuse_fewer_steps(run, begun, step=step)
    return Beginning(
        run=begun,
        identity=identity,
        held=held,
        step=step,
        changes=found.changed,
        notes=(*notes_of(found, step=step), *_note_on_results(options.folder, held)),
    )


def note_on_switches(run: Run, *, is_export: bool = False) -> tuple[str, ...]:
    """Notes on software that an estimate of the run has and its engine is not, or that its export does not hold.

    These are switches that the run file states, or that its recipe has and the engine does not by itself.
    """
    facts = engine_facts(run.engine)
    by_itself = facts.preset(run.model, Preset.ENGINE, run.cluster.accelerator if run.cluster else None).stated()
    asked = {k: v for k, v in switches_of(run).stated().items() if by_itself.get(k, v) != v}
    left = switches_without_setting(run, asked | run.stack.features.stated(), is_export=is_export)
    vendor = run.cluster.accelerator.vendor if run.cluster else ""
    of_program = notes_on_framework(run.engine, run.stack, vendor=vendor)
    own = [f"{key} by {name}" for key, name in OTHER_KEYS.items() if key in left and run.engine == NATIVE]
    hint = f" (it switches {', '.join(own)})" if own else ""
    return (*of_program, *(f"{note}{hint}" for note in note_on_left_switches(left)))


OTHER_KEYS = {"compiles": "train.compile", "attention": "kernels.routes.attention"}
"""Keys with which the native engine switches what an estimate reads under `stack`."""


def notes_of(found: run_identity.Comparison, *, step: int) -> tuple[str, ...]:
    """Notes on settings that changed after `step`, and on those that could not be compared."""
    lines = []
    if found.changed:
        lines.append(f"from step {step + 1} on other settings than before: {'; '.join(found.changed)}")
    if found.unknown:
        lines.append(f"an older release wrote the checkpoint: not compared are {', '.join(found.unknown)}")
    return tuple(lines)


def _refuse_fewer_steps(run: Run, begun: Run, *, step: int) -> None:
    """Raise InputError if `run` ends before its newest checkpoint, after `step` steps."""
    if begun.num_steps is None or begun.num_steps >= step:
        return
    tokens = run.train.tokens
    raise InputError(
        f"train.{'steps' if tokens is None else 'tokens'}: the run has gone further, its newest checkpoint is from "
        f"after step {step}",
        got=begun.num_steps if tokens is None else f"{tokens}, which is step {begun.num_steps}",
        allowed=f"step {step} or later",
        hint=f"train.steps={step} or more; --branch (branch=True in Python) starts a new run from its weights",
    )


def _note_on_branch(run: Run, identity: run_identity.RunIdentity) -> tuple[str, ...]:
    branch, saves = identity.branched_from, run.train.checkpoint
    if branch is None:
        return ()
    again = (
        ""
        if saves is None
        else f"; resume it with {' '.join(f'--set {shlex.quote(o)}' for o in run.overrides)} --resume"
    )
    return (f"a new run from the weights of {branch.checkpoint}, after step {branch.step} of {branch.run}{again}",)


def _note_on_results(folder: Path, held: run_identity.RunIdentity) -> tuple[str, ...]:
    if not held.results or Path(held.results).resolve() == folder.resolve():
        return ()
    return (f"results of the steps before are, or were, in {held.results}",)


def _with_steps(run: Run, held: run_identity.RunIdentity, *, step: int, folder: Path) -> Run:
    """The run with the number of steps in which it sees `train.tokens`, those before a change of the batch included."""
    if run.train.tokens is None or not held.batches:
        return run
    left = run.train.tokens - run_identity.tokens_in(folder, held=held, step=step)
    steps = step + -(-left // run.tokens_per_step)
    if steps == run.num_steps:
        return run
    return replace(run, train=replace(run.train, steps=steps, tokens=None))
