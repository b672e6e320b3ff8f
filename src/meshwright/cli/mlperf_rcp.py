"""`meshwright mlperf rcp`: make reference convergence points and print them."""

from __future__ import annotations

from typing import Any

from meshwright.api.mlperf import mlperf_rcp
from meshwright.api.question import ask
from meshwright.cli.output import emit_json, note, print_table


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Make the points, write them if asked, and print them."""
    found = ask(mlperf_rcp, asked)
    if asked["out"] is not None:
        note(f"{asked['out']} has {len(found.document)} points")
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
