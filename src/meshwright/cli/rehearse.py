"""`meshwright rehearse`: a plan's parallel structure on local CPU processes, against one process."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import json_option, run_argument, set_option, verb
from meshwright.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from meshwright.engines.native.rehearsal import RehearsalResult, Toy
    from meshwright.specs.plan import Plan
    from meshwright.specs.run import Run

MOST_PROCESSES = 8  # a toy tensor is 8 rows or more: each process has a part of each


@verb(
    "rehearse",
    examples=[
        "meshwright rehearse run.yaml",
        "meshwright rehearse run.yaml --processes 8 --json",
        "meshwright rehearse run.yaml --set parallel.tensor=4",
    ],
)
@run_argument()
@set_option
@click.option(
    "--processes", "num_processes", type=click.IntRange(2, MOST_PROCESSES), default=4, show_default=True,
    metavar="N", help="Local processes at most.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
    help="When a rehearsal that is not done counts as a deadlock.",
)  # fmt: skip
@json_option
def command(
    run_path: Path, overrides: tuple[str, ...], num_processes: int, timeout_s: float, as_json: bool
) -> None:
    """Try a plan before anyone rents a GPU.

    Runs the plan of a run file, with fewer processes on each of its axes and a model of toy width, on local CPU
    processes, and compares losses, gradients and weights with one process. Exits with 1 when they differ, when the
    processes wait for each other, or when the native engine cannot run the plan.
    """
    from meshwright import runfile
    from meshwright.cli.output import emit_json, progress

    run = runfile.load(run_path, overrides=overrides)
    require_torch("a rehearsal")
    plan = _plan_of(run)
    _require_possible(run, plan)

    from meshwright.engines.native.rehearsal import rehearse, shrink

    toy = shrink(run, plan, num_processes=num_processes)
    with progress(f"rehearsing {toy.plan.describe()}"):
        found = rehearse(toy.run, toy.plan, timeout_s=timeout_s)
    if as_json:
        emit_json(_document(run, plan, toy, found))
    else:
        _show(run, plan, toy, found, num_processes=num_processes)
    if not found.is_equal:
        raise click.exceptions.Exit(1)


def _plan_of(run: Run) -> Plan:
    """The pinned plan, or the one that the planner would choose."""
    plan = run.plan
    if plan is None:
        if run.cluster is None:
            raise InputError(
                "a rehearsal needs a plan: this run pins none and names no cluster to plan for",
                got=run.cluster_name, hint="for example --set cluster=h100-8x1, or --set parallel.data_shard=2",
            )  # fmt: skip
        from meshwright.planner.choice import best_plans, free_request, goal_of

        plan = best_plans(free_request(run), goal=goal_of(run)).plans[0].plan
    if plan.num_devices == 1:
        raise InputError("a plan of one device has nothing to rehearse", got=plan.describe())
    return plan


def _require_possible(run: Run, plan: Plan) -> None:
    """Refuse what the engine cannot do of the real model and plan; formats, data and steps are the rehearsal's own."""
    from meshwright.engines.native.check import check
    from meshwright.specs.precision import PRECISIONS
    from meshwright.specs.run import Data

    train = replace(run.train, steps=1, tokens=None, evaluate=None)
    tried = replace(run, plan=plan, precision=PRECISIONS["fp32"], data=Data(), train=train)
    if problems := check(tried):
        raise InfeasibleError(
            f"the native engine cannot run {plan.describe()}: {'; '.join(map(str, problems))}",
            hint=next((p.hint for p in problems if p.hint), None),
        )


def _document(run: Run, plan: Plan, toy: Toy, found: RehearsalResult) -> dict[str, Any]:
    from meshwright.engines.native.rehearsal import TOLERANCE

    return {
        "run": run.name,
        "model": run.model.name,
        "plan": {"describe": plan.describe(), **asdict(plan)},
        "rehearsed": {"describe": toy.plan.describe(), **asdict(toy.plan), "model": toy.run.model},
        "changes": toy.changes,
        "left_out": toy.left_out,
        "equal": found.is_equal,
        "tolerance": TOLERANCE,
        "max_error": {
            "loss": found.loss_error, "gradient": found.gradient_error, "weight": found.weight_error
        },
        "comparison": found,
    }  # fmt: skip


def _show(run: Run, plan: Plan, toy: Toy, found: RehearsalResult, *, num_processes: int) -> None:
    from meshwright.cli.output import note, print_line, print_table
    from meshwright.engines.native.rehearsal import NUM_STEPS, TOLERANCE
    from meshwright.units import format_bytes, format_seconds

    print_line(f"{run.name}: {run.model.name}, {plan.describe()}", style="bold")
    print_line(f"Rehearsed: {toy.plan.describe()}, {found.num_processes} processes, {_toy_words(toy)}.")
    print_line(f"Scaled: {', '.join(toy.changes) or 'nothing, the plan is whole'}.")
    print_line()
    worst_gradient = max(found.gradient_errors, key=found.gradient_errors.__getitem__)
    worst_weight = max(found.weight_errors, key=found.weight_errors.__getitem__)
    rows = [
        (f"loss of {NUM_STEPS} steps", f"{found.loss_error:.1e}", ""),
        ("gradient of the first", f"{found.gradient_error:.1e}", worst_gradient),
        ("weight after the last", f"{found.weight_error:.1e}", worst_weight),
    ]
    columns = {"against one process": "left", "largest difference": "right", "of": "left"}
    print_table(columns, rows)  # pyright: ignore[reportArgumentType]
    memory = ", ".join(format_bytes(m) for m in found.memory_bytes)
    print_line(f"Memory by process, the comparison included: {memory}; {format_seconds(found.seconds)}.")
    print_line()
    if found.is_equal:
        print_line(f"Equal to one process within {TOLERANCE:g}, and no deadlock.", style="bold")
    else:
        print_line(f"Not equal to one process: differences above {TOLERANCE:g}.", style="bold red")
    if toy.left_out:
        more = f"; --processes {MOST_PROCESSES} has more" if num_processes < MOST_PROCESSES else ""
        note(f"no room for {', '.join(toy.left_out)} in {num_processes} processes: not rehearsed{more}")


def _toy_words(toy: Toy) -> str:
    m = toy.run.model
    kinds = [f"{m.num_layers} layers", f"hidden {m.hidden}", f"{toy.run.sequence_length} tokens"]
    if m.experts is not None:
        kinds.append(f"{m.experts.num_experts} experts")
    return f"{', '.join(kinds)}, fp32, random tokens"
