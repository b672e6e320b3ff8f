"""`meshwright plan`: search all legal sharding plans, rank them, say why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import (
    calibration_option,
    description_options,
    fix_option,
    json_option,
    run_argument,
    set_option,
    verb,
    why_not_option,
)
from meshwright.cli.run_input import OBJECTIVE_WORDS

if TYPE_CHECKING:
    from meshwright.cli.output import Align
    from meshwright.engines.base import Unsupported
    from meshwright.planner import PlanRequest, PlanResult, RankedPlan, WhyNot
    from meshwright.planner.estimate import PlanEstimate
    from meshwright.planner.objective import Goal
    from meshwright.specs.run import Run

FRONT_SLACK = 0.25
"""--pareto looks at plans up to this share worse than the best."""

NUM_LOSERS = 3
"""Plans that --explain holds against the first, whatever --top says."""


@verb(
    "plan",
    examples=[
        "meshwright plan --model llama3.1-8b --cluster mi355x-8x8 --gbs 512 --seq 8192",
        "meshwright plan --model moe-2t --cluster mi355x-8x12288 --gbs 32768 --seq 4096 --json",
        "meshwright plan examples/runs/llama3.1-8b-pretrain.yaml --explain --why-not tensor=8",
        "meshwright plan examples/runs/llama3.1-8b-pretrain.yaml --write pinned.yaml",
    ],
)
@run_argument(required=False)
@description_options
@click.option("--top", type=click.IntRange(1, 100), default=10, show_default=True, help="Plans to show.")
@click.option(
    "--objective", type=click.Choice(list(OBJECTIVE_WORDS)), help="What to make best; tokens/s by default."
)
@fix_option
@set_option
@calibration_option
@click.option("--explain", is_flag=True, help="Say why the first plan wins, and what the next ones lose.")
@why_not_option
@click.option("--pareto", is_flag=True, help="Also show the plans that trade speed for memory.")
@click.option(
    "--write", "write_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.yaml",
    help="Write a run file that pins the first plan.",
)  # fmt: skip
@json_option
def command(
    run_path: Path | None,
    top: int,
    objective: str | None,
    fixes: tuple[str, ...],
    overrides: tuple[str, ...],
    explain: bool,
    questions: tuple[str, ...],
    pareto: bool,
    write_path: Path | None,
    as_json: bool,
    **described: Any,
) -> None:
    """Search all legal sharding plans for a run and rank them.

    Describe the run with a file, with --model, --cluster, --gbs (sequences) and --seq, or with a file and
    options that replace its keys. A plan that the file pins is ignored.
    """
    from meshwright.cli.output import emit_json, note, progress
    from meshwright.cli.run_input import run_from
    from meshwright.engines.choice import not_run
    from meshwright.planner.choice import best_plans, free_request, goal_of
    from meshwright.planner.fixed import fixed_fields

    run = run_from(run_path, overrides=overrides, objective=objective, **described)
    request = free_request(run).fixing(**fixed_fields(fixes))
    goal = goal_of(run)
    with progress(f"planning {request.model.name} on {run.cluster_name}"):
        result = best_plans(
            request, goal=goal, top=max(top, 1 + NUM_LOSERS), slack=FRONT_SLACK if pareto else 0.0
        )
        answers = _answers(request, questions, result, goal)
        estimates = _estimates(request, result.plans[:top])
    if write_path is not None:
        from meshwright.runfile import pin_plan

        pin_plan(run, result.plans[0].plan, write_path)
        note(f"wrote {write_path}")
    refused = not_run(run)
    for problem in refused:
        note(f"{run.engine} does not run these plans: {problem}")
    if as_json:
        emit_json(_document(run, result, estimates, answers, refused, pareto=pareto))
        return
    _print_plans(run, result, estimates)
    if pareto:
        _print_front(result)
    if explain:
        _print_losers(result)
    if answers:
        _print_answers(answers)


def _answers(request: PlanRequest, questions: Sequence[str], result: PlanResult, goal: Goal) -> list[WhyNot]:
    from meshwright.planner import why_not
    from meshwright.planner.fixed import fixed_fields

    winner = result.plans[0]
    return [why_not(request, fixed_fields([q]), winner=winner, goal=goal) for q in questions]


def _estimates(request: PlanRequest, plans: Sequence[RankedPlan]) -> list[PlanEstimate]:
    from meshwright.planner.estimate import estimate_plan

    return [estimate_plan(request, ranked.plan) for ranked in plans]


# --- JSON ---


def _document(
    run: Run,
    result: PlanResult,
    estimates: list[PlanEstimate],
    answers: list[WhyNot],
    refused: Sequence[Unsupported],
    *,
    pareto: bool,
) -> dict[str, Any]:
    from meshwright.planner import nearest_losers
    from meshwright.report.documents.plan import (
        comparison_document,
        plan_document,
        request_document,
        step_document,
        why_not_document,
    )

    plans = [
        {"rank": i, **plan_document(done.plan), "objective_value": ranked.value, **step_document(done.step)}
        for i, (ranked, done) in enumerate(zip(result.plans, estimates, strict=False), start=1)
    ]
    document = {
        "request": request_document(run, result.request),
        "plans": plans,
        "counts": result.counts,
        "seconds": {**result.seconds, "search": sum(result.seconds.values())},
        "explanation": {
            "losers": [comparison_document(c) for c in nearest_losers(result, count=NUM_LOSERS)],
            "why_not": [why_not_document(a) for a in answers],
            "not_tried": result.space.left_out,
            "engine_refuses": [str(problem) for problem in refused],
        },
    }
    if pareto:
        document["pareto"] = [
            {**plan_document(r.plan), "step_s": r.step_s, "reserved_bytes": r.reserved_bytes}
            for r in result.front
        ]
    return document


# --- tables ---


def _print_plans(run: Run, result: PlanResult, estimates: list[PlanEstimate]) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.units import gib

    request, counts = result.request, result.counts
    print_line(
        f"{request.model.name} on {run.cluster_name} ({request.num_devices:,} devices), "
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens, "
        f"{request.precision.name}, engine {request.engine}"
    )
    print_line()
    headings: dict[str, Align] = {
        "   plan": "left", "step": "right", "tokens/s/device\n(80 % interval)": "right", "MFU": "right",
        f"GiB\nof {gib(request.cluster.accelerator.memory_bytes):.0f}": "right", "bound by": "left",
    }  # fmt: skip
    print_table(headings, (_row(i, done) for i, done in enumerate(estimates, start=1)))
    print_line()
    print_line(
        f"{counts.enumerated:,} plans enumerated, {counts.expanded:,} not excluded by their bound, "
        f"{counts.legal:,} of these legal, {counts.fit:,} fit, {counts.scored:,} scored, "
        f"{counts.simulated:,} simulated; {sum(result.seconds.values()):.2f} s"
    )


def _row(rank: int, done: PlanEstimate) -> tuple[object, ...]:
    from meshwright.report.components import bound_by
    from meshwright.report.quantities import percent, rate, value_of
    from meshwright.units import gib

    step, tokens = done.step, done.step.tokens_per_s_per_device
    return (
        f"{rank:>2} {done.plan.describe()}",
        value_of(step.step),
        f"{rate(tokens.value)} ({rate(tokens.low)}–{rate(tokens.high)})",
        percent(step.mfu.value),
        f"{gib(step.memory.reserved_bytes):.1f}",
        bound_by(step.components_s),
    )


def _print_front(result: PlanResult) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.report.quantities import seconds
    from meshwright.units import gib

    rows = [(r.plan.describe(), seconds(r.step_s), f"{gib(r.reserved_bytes):.1f}") for r in result.front]
    print_line()
    print_table(
        {"plan": "left", "step": "right", "GiB": "right"},
        rows,
        title="Speed against memory: no plan is better in both",
    )


def _print_losers(result: PlanResult) -> None:
    from meshwright.cli.output import print_line
    from meshwright.planner import nearest_losers
    from meshwright.report.documents.plan import loser_sentence

    print_line()
    print_line(f"Why {result.plans[0].plan.describe()}", style="bold")
    for comparison in nearest_losers(result, count=NUM_LOSERS):
        print_line(f"- {loser_sentence(comparison)}")
    if len(result.plans) == 1:
        print_line("It is the only plan that is legal and fits.")


def _print_answers(answers: list[WhyNot]) -> None:
    from meshwright.cli.output import print_line
    from meshwright.report.documents.plan import why_not_sentence

    print_line()
    print_line("Why not", style="bold")
    for answer in answers:
        print_line(f"- {why_not_sentence(answer)}")
