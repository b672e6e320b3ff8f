"""`meshwright plan`: search all legal sharding plans, rank and explain them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.cli.output import Align, emit_json, note, print_line, print_table, progress
from meshwright.cli.run_input import run_from
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.fixed import fixed_fields
from meshwright.report.components import bound_by
from meshwright.report.documents.plan import loser_sentence, why_not_sentence
from meshwright.report.plan_ranking import PlanRanking, plan_run
from meshwright.report.quantities import percent, rate, seconds, value_of
from meshwright.units import gib


def run(
    *,
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
    **run_options: Any,
) -> None:
    """Search, then print or write what was asked for. `run_options`: options that replace keys of the run file."""
    run = run_from(run_path, overrides=overrides, objective=objective, **run_options)
    fixed, asked = fixed_fields(fixes), [fixed_fields([question]) for question in questions]
    with progress(f"planning {run.model.name} on {run.cluster_name}"):
        ranking = plan_run(
            run, top=top, fixed=fixed, questions=asked, with_front=pareto, with_neighbours=explain
        )
    if write_path is not None:
        ranking.write(write_path)
        note(f"wrote {write_path}")
    if run.label_tokens is not None:
        least = run.tokens_per_step // run.tokens_per_batch
        note(f"plans are compared for one global batch; a step of batch.label_tokens takes {least} or more")
    for problem in ranking.engine_refuses:
        note(f"{run.engine} does not run these plans: {problem}")
    if as_json:
        emit_json(ranking.to_dict())
        return
    _print_plans(ranking)
    if pareto:
        _print_front(ranking)
    if explain:
        _print_losers(ranking)
    if ranking.why_not:
        _print_answers(ranking)


def _print_plans(ranking: PlanRanking) -> None:
    request, counts = ranking.request, ranking.search.counts
    print_line(
        f"{request.model.name} on {ranking.run.cluster_name} ({request.num_devices:,} devices), "
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens, "
        f"{request.precision.name}, engine {request.engine}"
    )
    print_line()
    headings: dict[str, Align] = {
        "   plan": "left", "step": "right", "tokens/s/device\n(80 % interval)": "right", "MFU": "right",
        f"GiB\nof {gib(request.cluster.accelerator.memory_bytes):.0f}": "right", "bound by": "left",
    }  # fmt: skip
    print_table(headings, (_row(i, done) for i, done in enumerate(ranking, start=1)))
    print_line()
    print_line(
        f"{counts.enumerated:,} plans enumerated, {counts.expanded:,} not excluded by their bound, "
        f"{counts.legal:,} of these legal, {counts.fit:,} fit, {counts.scored:,} scored, "
        f"{counts.simulated:,} simulated; {sum(ranking.search.seconds.values()):.2f} s"
    )


def _row(rank: int, done: PlanEstimate) -> tuple[object, ...]:
    step, tokens = done.step, done.step.tokens_per_s_per_device
    return (
        f"{rank:>2} {done.plan.describe()}",
        value_of(step.step),
        f"{rate(tokens.value)} ({rate(tokens.low)}–{rate(tokens.high)})",
        percent(step.mfu.value),
        f"{gib(step.memory.reserved_bytes):.1f}",
        bound_by(step.components_s),
    )


def _print_front(ranking: PlanRanking) -> None:
    rows = [(r.plan.describe(), seconds(r.step_s), f"{gib(r.reserved_bytes):.1f}") for r in ranking.front]
    print_line()
    print_table(
        {"plan": "left", "step": "right", "GiB": "right"},
        rows,
        title="Speed against memory: no plan is better in both",
    )


def _print_losers(ranking: PlanRanking) -> None:
    print_line()
    print_line(f"Why {ranking.best.plan.describe()}", style="bold")
    for comparison in ranking.losers:
        print_line(f"- {loser_sentence(comparison)}")
    if len(ranking.search.plans) == 1:
        print_line("It is the only plan that is legal and fits.")
    if ranking.neighbours:
        print_line()
        print_line("Faster near this request", style="bold")
        for neighbour in ranking.neighbours:
            print_line(f"- {neighbour}")


def _print_answers(ranking: PlanRanking) -> None:
    print_line()
    print_line("Why not", style="bold")
    for answer in ranking.why_not:
        print_line(f"- {why_not_sentence(answer)}")
