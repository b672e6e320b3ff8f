"""`meshwright mlperf rcp`: make reference convergence points and print them."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import emit_json, note, print_table
from meshwright.mlperf.convergence import pruned
from meshwright.mlperf.reference_runs import (
    ReferenceDescription,
    reference_document,
    reference_points_of,
    write_reference_file,
)


def run(
    *,
    paths: tuple[Path, ...],
    round_name: str | None,
    benchmark: str | None,
    folders: tuple[Path, ...],
    creator: str,
    platform: str,
    when: str,
    precision: str,
    out_path: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Make the points, write them if asked, and print them."""
    description = ReferenceDescription(creator=creator, platform=platform, when=when, precision=precision)
    document, rules = reference_document(
        paths, description=description, round=round_name, benchmark=benchmark, more_benchmarks=folders
    )
    if out_path is not None:
        document = write_reference_file(out_path, document, rules, replace=replace)
        note(f"{out_path} has {len(document)} points")
    if as_json:
        emit_json(document)
        return
    points = reference_points_of(document, rules)
    kept = pruned(points, runs=rules.runs)
    print_table(
        {"batch size": "right", "runs": "right", "mean": "right", "std": "right", "least": "right", "": "left"},
        [
            (
                p.global_batch_size, len(p.counts), f"{p.mean:,.1f}", f"{p.std:,.1f}", f"{p.min_ok:,.1f}",
                "" if p in kept else "pruned",
            )
            for p in points
        ],
        caption=f"{rules.name}: samples to convergence",
    )  # fmt: skip
