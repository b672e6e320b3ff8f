"""`meshwright mlperf score`: score sets of runs and print them."""

from __future__ import annotations

from typing import Any

import click

from meshwright.api.mlperf import mlperf_score
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.mlperf.documents import UNVERIFIED, scaling_file, score_prospect
from meshwright.mlperf.score import Score


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Score every set, print, and exit with 1 if one is no result."""
    found = ask(mlperf_score, asked)
    if as_json:
        emit_json(found.to_dict())
    else:
        _print(list(found.scores))
    for row in found.skipped:
        note(f"{row.where} is not scored: {row.reason}")
    if not found.passes:
        raise click.exceptions.Exit(1)


def _print(scores: list[Score]) -> None:
    if len(scores) == 1:
        _print_runs(scores[0])
    columns = {"set": "left", "benchmark": "left", "round": "left", "runs": "right", "batch": "right"}
    columns |= {"raw min": "right", "factor": "right", "score min": "right", "result": "left"}
    print_table(
        columns,  # pyright: ignore[reportArgumentType]
        [
            (
                _name(s), s.benchmark.name, s.benchmark.round, len(s.runs), s.global_batch_size, _minutes(s.raw_min),
                f"{s.test.scaling:.4f}", _minutes(s.score_min), "passes" if s.passes else "no result",
            )
            for s in scores
        ],
        caption=UNVERIFIED if any(s.benchmark.official for s in scores) else None,
    )  # fmt: skip
    for score in scores:
        name = f"{_name(score)}: " if len(scores) > 1 else ""
        for problem in score.problems:
            print_line(f"{name}{problem}", style="red")
        if len(scores) == 1 or not score.test.passes:
            print_line(f"{name}{score.test.message}")
        written = scaling_file(score)
        if written is not None and abs(written - score.test.scaling) > 1e-6:
            print_line(f"{name}scaling.json says {written:.4f}; the logs give {score.test.scaling:.4f}", style="yellow")
        _print_prospect(score, name)


def _print_runs(score: Score) -> None:
    rows = [
        (r.name, _minutes(r.minutes), r.samples and f"{r.samples:,.0f}", _place(score, r.name, r.problem))
        for r in score.runs
    ]
    print_table({"run": "left", "minutes": "right", "samples": "right", "": "left"}, rows)
    print_line()


def _print_prospect(score: Score, name: str) -> None:
    found = score_prospect(score)
    if found is None:
        return
    if found.problem:
        print_line(f"{name}a set of {found.num_runs} cannot pass: {found.problem}", style="red")
        return
    scaling = "" if found.expected_scaling is None else f"; expected factor {found.expected_scaling:.3f}"
    print_line(
        f"{name}after {found.num_seen} runs, a set of {found.num_runs} passes with probability "
        f"{found.probability:.0%}{scaling}"
    )


def _place(score: Score, name: str, problem: str) -> str:
    if problem:
        return problem
    if name in score.kept:
        return "kept"
    return "dropped" if name in score.dropped else "outside the median window"


def _name(score: Score) -> str:
    parts = score.folder.absolute().parts
    return "/".join(parts[-2:]) if len(parts) > 2 else str(score.folder)


def _minutes(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
