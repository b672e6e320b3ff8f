"""`meshwright plan`: search all legal sharding plans, rank them, say why."""

from __future__ import annotations

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
    from meshwright.planner.estimate import PlanEstimate
    from meshwright.report.plan_ranking import PlanRanking


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
    from meshwright.planner.fixed import fixed_fields
    from meshwright.report.plan_ranking import plan_run

    run = run_from(run_path, overrides=overrides, objective=objective, **described)
    fixed, asked = fixed_fields(fixes), [fixed_fields([question]) for question in questions]
    with progress(f"planning {run.model.name} on {run.cluster_name}"):
        ranking = plan_run(run, top=top, fixed=fixed, questions=asked, with_front=pareto)
    if write_path is not None:
        ranking.write(write_path)
        note(f"wrote {write_path}")
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
    from meshwright.cli.output import print_line, print_table
    from meshwright.units import gib

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


def _print_front(ranking: PlanRanking) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.report.quantities import seconds
    from meshwright.units import gib

    rows = [(r.plan.describe(), seconds(r.step_s), f"{gib(r.reserved_bytes):.1f}") for r in ranking.front]
    print_line()
    print_table(
        {"plan": "left", "step": "right", "GiB": "right"},
        rows,
        title="Speed against memory: no plan is better in both",
    )


def _print_losers(ranking: PlanRanking) -> None:
    from meshwright.cli.output import print_line
    from meshwright.report.documents.plan import loser_sentence

    print_line()
    print_line(f"Why {ranking.best.plan.describe()}", style="bold")
    for comparison in ranking.losers:
        print_line(f"- {loser_sentence(comparison)}")
    if len(ranking.search.plans) == 1:
        print_line("It is the only plan that is legal and fits.")


def _print_answers(ranking: PlanRanking) -> None:
    from meshwright.cli.output import print_line
    from meshwright.report.documents.plan import why_not_sentence

    print_line()
    print_line("Why not", style="bold")
    for answer in ranking.why_not:
        print_line(f"- {why_not_sentence(answer)}")
