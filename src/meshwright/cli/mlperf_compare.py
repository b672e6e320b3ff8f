"""`meshwright mlperf compare`: collect results, relate them and print the tables."""

from __future__ import annotations

from typing import Any

from meshwright.api.mlperf import mlperf_compare
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, print_line, print_table
from meshwright.mlperf.compare import PUBLISHED, ComparedGroup, ResultComparison


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Compare and print."""
    found = ask(mlperf_compare, asked)
    if as_json:
        emit_json(found.to_dict())
    else:
        _print(found)


def _print(comparison: ResultComparison) -> None:
    rows = [
        (
            g.benchmark if i == 0 else "", g.round if i == 0 else "", _size(g) if i == 0 else "", r.submitter, r.system,
            f"{r.score_min:.2f}", "" if r.label == PUBLISHED else "unverified",
        )
        for g in comparison.groups
        for i, r in enumerate(g.results)
    ]  # fmt: skip
    columns = {"benchmark": "left", "round": "left", "on": "left", "submitter": "left", "system": "left"}
    print_table({**columns, "minutes": "right", "": "left"}, rows)  # pyright: ignore[reportArgumentType]
    print_line()
    summary = [
        (
            g.benchmark, g.round, _size(g), len(g.results), f"{g.mean_min:.2f}", g.maker and f"{g.maker.score_min:.2f}",
            g.partner_mean_min and f"{g.partner_mean_min:.2f}", None if g.spread is None else f"{g.spread:.1%}",
        )
        for g in comparison.groups
    ]  # fmt: skip
    right = dict.fromkeys(("sets", "mean", "maker", "partners", "spread"), "right")
    print_table({"benchmark": "left", "round": "left", "on": "left", **right}, summary)  # pyright: ignore[reportArgumentType]
    print_line()
    for r in comparison.generations:
        devices = f"{r.num_accelerators} accelerators" if r.num_accelerators else "a size not stated"
        print_line(f"{r.benchmark}, {devices}: {r.faster} is {r.ratio:.2f}x {r.slower} ({r.of})")
    for number, text in enumerate(comparison.endnotes, start=1):
        print_line(f"[{number}] {text}")


def _size(group: ComparedGroup) -> str:
    return f"{group.num_accelerators or '?'} {group.accelerator}"
