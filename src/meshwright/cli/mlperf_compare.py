"""`meshwright mlperf compare`: collect results, relate them and print the tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cli.output import emit_json, print_line, print_table
from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import benchmark_names, round_rules
from meshwright.mlperf.compare import (
    PUBLISHED,
    ComparedGroup,
    ResultComparison,
    compare,
    compared_scores,
    published_results,
)
from meshwright.mlperf.score import result_folders, score_folder


def run(
    *,
    paths: tuple[Path, ...],
    rounds: tuple[str, ...],
    benchmarks: tuple[str, ...],
    accelerators: tuple[str, ...],
    devices: int | None,
    published: bool,
    baseline: str | None,
    folders: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare and print."""
    for name in rounds:
        round_rules(name)
    unknown = [b for b in benchmarks if b not in benchmark_names(folders)]
    if unknown:
        raise InputError("unknown benchmark", got=unknown[0], allowed=", ".join(benchmark_names(folders)))
    wanted = list(dict.fromkeys(f for path in paths for f in result_folders(path)))
    scores = [score_folder(folder, folders=folders) for folder in wanted]
    results = compared_scores(s for s in scores if not benchmarks or s.benchmark.name in benchmarks)
    official = all(s.benchmark.official for s in scores)
    if published and official:
        mine = {(r.round, r.submitter, r.system, r.benchmark) for r in results if r.label == PUBLISHED}
        found = published_results(
            rounds=rounds, benchmarks=benchmarks, accelerators=accelerators, devices=devices
        )
        results += [r for r in found if (r.round, r.submitter, r.system, r.benchmark) not in mine]
    comparison = compare(results, baseline=baseline)
    if as_json:
        emit_json(_document(comparison))
    else:
        _print(comparison)


def _document(comparison: ResultComparison) -> dict[str, Any]:
    return {
        "groups": [
            {
                "round": g.round, "benchmark": g.benchmark, "accelerator": g.accelerator,
                "num_accelerators": g.num_accelerators, "mean_min": g.mean_min,
                "maker": g.maker and asdict(g.maker), "partner_mean_min": g.partner_mean_min, "spread": g.spread,
                "results": [asdict(r) for r in g.results],
            }
            for g in comparison.groups
        ],
        "generations": [asdict(r) for r in comparison.generations],
        "endnotes": list(comparison.endnotes),
    }  # fmt: skip


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
