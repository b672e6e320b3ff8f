"""Write the tables of docs/concepts/accuracy.md anew, after a new calibration.

    python scripts/renew_accuracy.py [--left-out LEFT_OUT.json]

Every source is fitted without its rows, which takes minutes; LEFT_OUT.json holds the document of an earlier
`meshwright accuracy --leave-one-source-out --json`. The script prints the errors by kind of model, which prose quotes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.accuracy.report import LATER, subset_of
from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.accuracy.tables import tables_of
from meshwright.cost.uncertainty import kinds_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "accuracy.md"
COLUMNS = "predicted | median | p90 | bias | in the 80 % interval | fitted: median | p90 |"
SUBSETS = (
    "quality A, GPU, no sweep", "other quality, GPU, no sweep", "other accelerators", LATER, "sweep hagemann_layouts",
    "sweep vtrain_single", "sweep hf_ultrascale",
)  # fmt: skip


def document(*options: str) -> dict[str, Any]:
    """Return the document of `meshwright accuracy`."""
    command = [sys.executable, "-m", "meshwright", "accuracy", "--json", *options]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def rows(names: Iterable[str], left_out: dict[str, Any], fitted: dict[str, Any]) -> str:
    """Return the rows of a table. Each document maps names of groups to their metrics."""
    written = ""
    for name in names:
        a, b = left_out[name], fitted[name]
        written += (
            f"| {name} | {a['num_predicted']} | {100 * a['median_abs_error']:.1f} % | {100 * a['p90_abs_error']:.0f} % "
            f"| {100 * a['bias']:+.1f} % | {100 * a['interval_coverage']:.0f} % "
            f"| {100 * b['median_abs_error']:.1f} % | {100 * b['p90_abs_error']:.0f} % |\n"
        )
    return written


def with_table(text: str, heading: str, body: str) -> str:
    """Return `text` with `body` in place of the rows of the table whose first column has this heading."""
    head = f"| {heading} | {COLUMNS}\n"
    before, after = text.split(head)
    rule, *lines = after.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return before + head + rule + body + "".join(lines[end:])


def kinds(left_out: dict[str, Any]) -> str:
    """Return the errors outside sweeps by kind of model, for earlier and later sources."""
    runs = {run.id: run for run in read_runs(measured_runs_path()) if run.conditions is not None}
    tables = tables_of([run.conditions for run in runs.values() if run.conditions is not None])
    kind_of = dict(zip(runs, np.broadcast_to(kinds_of(tables.model), len(runs)), strict=True))
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in left_out["rows"]:
        run = runs.get(row["id"])
        if run is None or run.is_sweep or row["signed_error"] is None:
            continue
        sources = "later sources" if subset_of(run) == LATER else "earlier sources"
        errors[kind_of[run.id], sources].append(abs(row["signed_error"]))
        errors["all", sources].append(abs(row["signed_error"]))
    return "".join(
        f"{sources}, {kind}: {len(own)} rows, {100 * np.median(own):.1f} %, {100 * np.quantile(own, 0.9):.0f} %\n"
        for (kind, sources), own in sorted(errors.items(), key=lambda item: item[0][::-1])
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", type=Path, help="document of leave-one-source-out")
    path = parser.parse_args().left_out
    left_out = json.loads(path.read_text(encoding="utf-8")) if path else document("--leave-one-source-out")
    fitted = document()
    sweeps = {name.removeprefix("sweep ") for name in SUBSETS}
    by_source = (left_out["groups"]["source"], fitted["groups"]["source"])
    sources = sorted(name for name, group in by_source[0].items() if group["num_predicted"] and name not in sweeps)
    text = PAGE.read_text(encoding="utf-8")
    text = with_table(text, "rows", rows(SUBSETS, left_out["groups"]["subset"], fitted["groups"]["subset"]))
    text = with_table(text, "source", rows(sources, *by_source))
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(kinds(left_out))


if __name__ == "__main__":
    main()
