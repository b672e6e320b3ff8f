"""`meshwright mlperf rcp`: make reference convergence points and print them."""

from __future__ import annotations

from pathlib import Path

from meshwright.api.mlperf import mlperf_rcp
from meshwright.cli.output import emit_json, note, print_table


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
    found = mlperf_rcp(
        *paths, creator=creator, platform=platform, when=when, precision=precision, round_name=round_name,
        benchmark=benchmark, benchmarks=folders, out=out_path, replace=replace,
    )  # fmt: skip
    if out_path is not None:
        note(f"{out_path} has {len(found.document)} points")
    if as_json:
        emit_json(found.to_dict())
        return
    print_table(
        {"batch size": "right", "runs": "right", "mean": "right", "std": "right", "least": "right", "": "left"},
        [
            (
                row["global_batch_size"], row["num_runs"], f"{row['mean']:,.1f}", f"{row['std']:,.1f}",
                f"{row['min_ok']:,.1f}", "pruned" if row["is_pruned"] else "",
            )
            for row in found.to_rows()
        ],
        caption=f"{found.benchmark.name}: samples to convergence",
    )  # fmt: skip
