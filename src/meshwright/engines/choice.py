"""Choice of a plan: the planner's best one that the run's engine supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.catalog.engines import ANY, engines_on
from meshwright.catalog.stacks import notes_on_framework
from meshwright.engines.base import Unsupported, check_export, find_engine, refuse
from meshwright.engines.software_line import note_on_left_switches, switches_without_setting
from meshwright.errors import InputError
from meshwright.planner.choice import best_plans, goal_of, holding_software
from meshwright.planner.estimate import num_measured
from meshwright.planner.request import request_for
from meshwright.specs.hardware import THIS_MACHINE
from meshwright.specs.plan import Plan
from meshwright.specs.run import NATIVE, Run, with_plan, with_software

CANDIDATES = 50, 5000
"""Numbers of ranked plans to try: the second one only if the engine supports none of the first."""


TRAINING_KEYS = ("data", "train", "parallel", "weights")
"""Keys that do not matter to the choice of a plan, but for `STEP_KEYS`."""

STEP_KEYS = ("data.sequence_length", "train.compile")
"""Those of them that change the step."""


def not_run(run: Run) -> list[Unsupported]:
    """Reasons of model and numerics for which no program of the run's engine runs it under any plan."""
    problems = check_export(replace(run, plan=None))
    return [p for p in problems if p.key in STEP_KEYS or p.key.partition(".")[0] not in TRAINING_KEYS]


def with_planned_engine(run: Run) -> Run:
    """Return `run` with the engine that it is planned for: `any` where it names none and the default does not run it.

    Raises InputError with the reasons for which the engine that it names runs it under no plan.
    """
    if run.engine == ANY or not (reasons := not_run(run)):
        return run
    if run.is_engine_open:
        return with_engine(run, ANY)
    refuse(run.engine, reasons, hint=f"without an engine, one that runs it is planned for; --engine {ANY} names none")
    return run


def with_usual_engine(run: Run) -> Run:
    """Return `run`, which names no engine, with the engine to plan it for on the accelerators of its cluster.

    That is the engine of which most runs were measured on accelerators of this vendor, among those that run the model
    and its numbers. The default stays where none was measured, for the devices here, and with one's own calibration.
    """
    if run.cluster is None or run.calibration is not None or run.cluster.accelerator.vendor == THIS_MACHINE:
        return run
    accelerator = run.cluster.accelerator
    runs_by_engine = {name: num_measured(name, accelerator.vendor) for name in engines_on(accelerator)}
    for name in sorted(filter(runs_by_engine.get, runs_by_engine), key=runs_by_engine.__getitem__, reverse=True):
        named = with_engine(run, name)
        if not not_run(named):
            return replace(named, is_engine_open=True)
    return run


def with_engine(run: Run, engine: str) -> Run:
    """Return `run` with another engine, by its run file."""
    from meshwright.runfile import loads

    changed = loads(run.text, file=run.source, overrides=[*run.overrides, f"engine={engine}"], here=run.cluster)
    return replace(changed, name=run.name)


def notes_on_engine(run: Run) -> tuple[str, ...]:
    """Say what the engine of `run` refuses of it, and which engine a run that names none is planned for and why."""
    if run.engine == ANY:
        return ()
    refused = [p for p in check_export(replace(run, plan=None)) if p.key != "train"]  # steps are no matter of a plan
    text = "; ".join(map(str, refused))
    if run.is_engine_open and not_run(run):
        return (f"planned for engine: {ANY}, as {run.engine}, the default, does not run it: {text}",)
    notes = (f"`train` and `export` refuse this run with engine {run.engine}: {text}",) if refused else ()
    vendor = run.cluster.accelerator.vendor if run.cluster else ""
    if not notes_on_framework(run.engine, run.stack, vendor=vendor):  # of another program, all switches are its own
        notes += note_on_left_switches(switches_without_setting(run, run.stack.features.stated()))
    if not run.is_engine_open or run.engine == NATIVE or not vendor:
        return notes
    return (
        f"planned for engine: {run.engine}, as none is named: of those that run this, it has most measured runs on "
        f"accelerators of {vendor} ({num_measured(run.engine, vendor)}); --engine {NATIVE} plans for Meshwright's own",
        *notes,
    )


def notes_on_own_programs(run: Run) -> tuple[str, ...]:
    """Say what of a run with a plan `train` and `launch` refuse, where `export` writes it for the engine's programs."""
    exported = () if run.engine == ANY else check_export(run)
    refused = () if run.engine == ANY else [p for p in find_engine(run.engine).check(run) if p not in exported]
    if not refused or run.plan is None:
        return ()
    hints = "; ".join(dict.fromkeys(p.hint for p in refused if p.hint))
    way = f" ({hints})" if hints else ""
    return (
        f"`export` writes {run.plan.describe()} for {run.engine}'s own programs; `train` and `launch` refuse it: "
        f"{'; '.join(map(str, refused))}{way}",
    )


def is_exported(run: Run) -> Callable[[Plan], bool]:
    """Return whether a program of the run's engine runs the model and training of `run` under a plan, as under others.

    Problems that the engine reports under every plan do not count.
    """
    always = set(check_export(replace(run, plan=None)))
    return lambda plan: always.issuperset(check_export(with_plan(run, plan)))


def with_devices_here(run: Run, *, num_devices: int) -> Run:
    """Return `run` with the `data_shard` that its pinned plan leaves to the `num_devices` devices of this machine.

    A CPU is one device and runs as many processes as the plan has. Raises InputError where the other degrees do not
    divide the devices.
    """
    if run.plan is None or not run.is_data_shard_open:
        return run
    others = run.plan.num_devices
    if num_devices > others and num_devices % others:
        raise InputError(
            f"{run.source}: parallel: the degrees multiply to {others}, which does not divide the devices here",
            got=num_devices, hint="give parallel.data_shard to use fewer devices",
        )  # fmt: skip
    plan = replace(run.plan, data_shard=max(1, num_devices // others))
    return replace(run, plan=plan, is_data_shard_open=False)


def planned(run: Run, *, is_export: bool = False) -> Run:
    """Return `run` with a plan: its own, or the planner's best one that its engine supports.

    `is_export`: the plan comes with the switches of software that the planner chose, which need programs and libraries
    that a file for them states. A run that is trained has those that its engine sets by itself.

    Problems that the engine reports under every plan are ignored here. If the engine supports none of the plans, the
    best one is returned, and the engine's `check` reports the reasons.
    Raises InputError when the cluster is unknown to the planner, InfeasibleError when no plan fits.
    """
    if run.plan is not None:
        return run
    request, goal, engine = request_for(run), goal_of(run), find_engine(run.engine)
    always = set(engine.check(run))
    best: Run | None = None
    if not is_export:
        request = holding_software(request)
    for top in CANDIDATES:
        result = best_plans(request, goal=goal, top=top)
        request, ranked = holding_software(result.request), result.plans
        pinned = [with_plan(with_software(run, result.request.stack), found.plan) for found in ranked]
        best = best or pinned[0]
        supported = next((one for one in pinned if always.issuperset(engine.check(one))), None)
        if supported is not None:
            return supported
        if len(ranked) < top:
            break
    assert best is not None  # `best_plans` raises an error where no plan fits
    return best
