"""`meshwright plan`: search all legal sharding plans, rank and explain them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.answers.cluster import setup_lines
from meshwright.answers.components import bound_by
from meshwright.answers.documents.plan import loser_sentence, why_not_sentence
from meshwright.answers.plan_legend import explained, mark_of
from meshwright.answers.plan_ranking import PlanRanking
from meshwright.answers.quantities import percent, rate, seconds
from meshwright.api.plan import plan
from meshwright.api.question import ask
from meshwright.cli.output import Align, emitted_json, note, print_line, print_table, progress, write, write_page
from meshwright.cli.run_input import take_run
from meshwright.planner.neighbours import shares_few_divisors
from meshwright.planner.scored import ScoredPlans
from meshwright.planner.search import PlanResult
from meshwright.planner.training import price_sentence
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan
from meshwright.specs.run import Objective
from meshwright.units import JOULE_PER_KWH, gib


def run(
    *,
    asked: dict[str, Any],
    calibration: str | None,
    explain: bool,
    show_all: bool,
    limit: int,
    csv_path: Path | None,
    html_path: Path | None,
    write_path: Path | None,
) -> None:
    """Search, then print or write the answer."""
    run = take_run(asked, calibration=calibration)
    scored = limit if show_all or html_path is not None else 0
    with progress(f"planning {run.model.name} on {run.cluster_name}"):
        ranking = ask(plan, asked | {"neighbours": explain, "switches": explain, "scored": scored})
    write_page(ranking, html_path)
    write(csv_path, ranking.write_csv)
    write(write_path, ranking.write)
    if write_path is not None and run.num_steps is None:
        note("it says neither train.steps nor train.tokens, and `export` wants one: --set train.steps=N")
    note(*ranking.notes)
    if emitted_json(ranking):
        return
    if show_all:
        _print_all(ranking)
    else:
        _print_plans(ranking)
    if asked["front"]:
        _print_front(ranking)
    if explain:
        _print_losers(ranking)
    elif shares_few_divisors(ranking.request):
        print_line("Batch and devices have few divisors in common: --explain also searches sizes near them.")
    if ranking.why_not:
        _print_answers(ranking)


def _print_plans(ranking: PlanRanking) -> None:
    _print_request(ranking)
    listed = zip(ranking.to_rows(), ranking, strict=True)
    _print_rows(ranking, ((row, done.plan, done.step.components_s, "") for row, done in listed))
    for said in explained([done.plan for done in ranking], fixed=tuple(ranking.request.fixed)):
        print_line(said)
    if ranking.run.objective is Objective.COST:
        print_line(f"Price: {price_sentence(ranking.request.cluster, ranking.run.costs)}.")
    _print_counts(ranking.search)


def _print_all(ranking: PlanRanking) -> None:
    """Every scored plan; a diamond marks plans on the Pareto front of speed and memory."""
    scored = ranking.scored
    if scored is None:
        return
    _print_request(ranking)
    marks = {True: "\N{BLACK DIAMOND} ", False: "  "}
    listed = zip(ranking.to_scored_rows(), scored, strict=True)
    _print_rows(ranking, ((row, done.plan, done.components_s, marks[done.on_front]) for row, done in listed))
    _print_counts(scored)
    more = "all that are legal and fit" if scored.is_complete else "the best; --limit N lists more"
    if ranking.request.cluster.parts:
        more += "; the fastest also with layers in proportion to the speed of their part"
    print_line(f"{len(scored):,} plans: {more}. \N{BLACK DIAMOND} no listed plan is both faster and smaller")


def _print_request(ranking: PlanRanking) -> None:
    request = ranking.request
    devices = f"{request.num_devices:,} {'device' if request.num_devices == 1 else 'devices'}"
    print_line(
        f"{request.model.name} on {ranking.run.cluster_name} ({devices}), "
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens, "
        f"{request.precision.name}, engine {request.engine}"
    )
    for line in setup_lines(request, ranking.best.plan):
        print_line(line)
    if ranking.gradients is not None:
        print_line(f"software: {ranking.gradients}")
    if ranking.published is not None:
        print_line(f"published: {ranking.published}")
    print_line()


def _print_rows(
    ranking: PlanRanking, listed: Iterable[tuple[Mapping[str, Any], Plan, Mapping[str, float], str]]
) -> None:
    """Print the table of plans: of each its row, the plan, seconds by component, and its mark."""
    rows = []
    for row, listed_plan, components_s, mark in listed:
        tokens, low, high = (rate(row[f"tokens_per_s_per_device{end}"]) for end in ("", "_low", "_high"))
        name = f"{row['rank']:>2} {mark}{row['plan']}{mark_of(listed_plan)}"
        memory, value = f"{gib(row['reserved_bytes']):.1f}", _value(ranking, row["objective_value"])
        cells = (seconds(row["step_s"]), f"{tokens} ({low}–{high})", percent(row["mfu_ratio"]), memory)
        rows.append((name, *cells, bound_by(components_s), *value))
    headings: dict[str, Align] = {
        "   plan": "left", "step": "right", "tokens/s/device\n(80 % interval)": "right", "MFU": "right",
        f"GiB\nof {_capacities(ranking.request.cluster)}": "right", "bound by": "left",
    }  # fmt: skip
    if ranking.run.objective in UNITS:
        headings[UNITS[ranking.run.objective]] = "right"
    print_table(headings, rows)
    print_line()


def _value(ranking: PlanRanking, value: float) -> tuple[str, ...]:
    """The optimized quantity per million tokens, unless another column has it."""
    if ranking.run.objective not in UNITS:
        return ()
    per_million = value / (ranking.request.global_batch * ranking.request.seq_len) * 1e6
    return (f"{per_million / (JOULE_PER_KWH if ranking.run.objective is Objective.ENERGY else 1):.4g}",)


UNITS = {Objective.COST: "USD per\n1M tokens", Objective.ENERGY: "kWh per\n1M tokens"}
"""Heading of the column of an objective."""


def _capacities(cluster: Cluster) -> str:
    """Memory of a device, of every part that has another one: "80", "80/179"."""
    sizes = [gib(part.accelerator.memory_bytes) for part in cluster.parts or (cluster,)]
    return "/".join(dict.fromkeys(f"{size:.0f}" for size in sizes))


def _print_counts(done: PlanResult | ScoredPlans) -> None:
    counts = done.counts
    print_line(
        f"{counts.enumerated:,} plans enumerated, {counts.expanded:,} not excluded by their bound, "
        f"{counts.legal:,} of these legal, {counts.fit:,} fit, {counts.scored:,} scored, "
        f"{counts.simulated:,} simulated; {sum(done.seconds.values()):.2f} s"
    )


def _print_front(ranking: PlanRanking) -> None:
    rows = [(r.plan.describe(), seconds(r.step_s), f"{gib(r.reserved_bytes):.1f}") for r in ranking.front]
    print_line()
    print_table(
        {"plan": "left", "step": "right", "GiB": "right"}, rows, title="Speed against memory: no plan is better in both"
    )


def _print_losers(ranking: PlanRanking) -> None:
    print_line()
    print_line(f"Why {ranking.best.plan.describe()}", style="bold")
    for comparison in ranking.losers:
        print_line(f"- {loser_sentence(comparison)}")
    if len(ranking.search.plans) == 1:
        print_line("No other layout is legal and fits.")
    if ranking.neighbours:
        print_line()
        print_line("Better near this request", style="bold")
        for neighbour in ranking.neighbours:
            print_line(f"- {neighbour}")
    if ranking.switches:
        print_line()
        print_line("With other software, in these degrees", style="bold")
        for switch in ranking.switches:
            print_line(f"- {switch}")


def _print_answers(ranking: PlanRanking) -> None:
    print_line()
    print_line("Why not", style="bold")
    for answer in ranking.why_not:
        print_line(f"- {why_not_sentence(answer)}")
