"""The part of `meshwright rehearse` that imports PyTorch: run the plan at toy size, and compare with one process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.cli.commands.rehearse import MAX_PROCESSES
from meshwright.cli.output import emitted_json, exit_unless, note, print_line, print_table, progress
from meshwright.engines.native import rehearsal
from meshwright.engines.native.rehearsal import RehearsalResult, Toy
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.units import format_bytes, format_seconds


def rehearse(run: Run, plan: Plan, *, num_processes: int, timeout_s: float) -> None:
    """Rehearse and print the differences; exit with 1 if they exceed the tolerance."""
    toy = rehearsal.shrink(run, plan, num_processes=num_processes)
    with progress(f"rehearsing {toy.plan.describe()}"):
        found = rehearsal.rehearse(toy.run, toy.plan, timeout_s=timeout_s)
    if not emitted_json(_document(run, plan, toy, found)):
        _show(run, plan, toy, found, num_processes=num_processes)
    exit_unless(found.is_equal)


def _document(run: Run, plan: Plan, toy: Toy, found: RehearsalResult) -> dict[str, Any]:
    return {
        "run": run.name,
        "model": run.model.name,
        "plan": {"describe": plan.describe(), **asdict(plan)},
        "rehearsed": {"describe": toy.plan.describe(), **asdict(toy.plan), "model": toy.run.model},
        "changes": toy.changes,
        "left_out": toy.omitted_axes,
        "equal": found.is_equal,
        "tolerance": rehearsal.TOLERANCE,
        "max_error": {
            "loss": found.loss_error, "gradient": found.gradient_error, "weight": found.weight_error
        },
        "comparison": found,
    }  # fmt: skip


def _show(run: Run, plan: Plan, toy: Toy, found: RehearsalResult, *, num_processes: int) -> None:
    print_line(f"{run.name}: {run.model.name}, {plan.describe()}", style="bold")
    print_line(f"Rehearsed: {toy.plan.describe()}, {found.num_processes} processes, {_toy_model(toy)}.")
    print_line(f"Scaled: {', '.join(toy.changes) or 'nothing'}.")
    print_line()
    worst_gradient = max(found.gradient_errors, key=found.gradient_errors.__getitem__)
    worst_weight = max(found.weight_errors, key=found.weight_errors.__getitem__)
    rows = [
        (f"loss of {rehearsal.NUM_STEPS} steps", f"{found.loss_error:.1e}", ""),
        ("gradient of the first", f"{found.gradient_error:.1e}", worst_gradient),
        ("weight after the last", f"{found.weight_error:.1e}", worst_weight),
    ]
    print_table({"against one process": "left", "largest difference": "right", "of": "left"}, rows)
    memory = ", ".join(format_bytes(m) for m in found.memory_bytes)
    print_line(f"Memory by process, the comparison included: {memory}; {format_seconds(found.seconds)}.")
    print_line()
    if found.is_equal:
        print_line(f"Equal to one process within {rehearsal.TOLERANCE:g}, and no deadlock.", style="bold")
    else:
        print_line(f"Not equal to one process: differences above {rehearsal.TOLERANCE:g}.", style="bold red")
    if toy.omitted_axes:
        more = f"; --processes {MAX_PROCESSES} rehearses more" if num_processes < MAX_PROCESSES else ""
        note(f"no room for {', '.join(toy.omitted_axes)} in {num_processes} processes: not rehearsed{more}")


def _toy_model(toy: Toy) -> str:
    m = toy.run.model
    kinds = [f"{m.num_layers} layers", f"hidden {m.hidden}", f"{toy.run.sequence_length} tokens"]
    if m.experts is not None:
        kinds.append(f"{m.experts.num_experts} experts")
    return f"{', '.join(kinds)}, fp32, random tokens"
