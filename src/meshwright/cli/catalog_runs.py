"""Tables of `meshwright catalog runs`: shipped run files and their predictions."""

from __future__ import annotations

import sys
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.cli.output import Align, print_line, print_table
from meshwright.units import gib


def print_run_files(document: dict[str, Any]) -> None:
    """Print a table of all, or the text of one; then the predictions, if any."""
    rows = document.get("runs", [document])
    if "text" in document:
        sys.stdout.write(document["text"])
    elif "predictions" not in rows[0]:
        headings: dict[str, Align] = {
            "run": "left", "task": "left", "batch": "right", "precision": "left", "cluster": "left", "engine": "left",
        }  # fmt: skip
        print_table(headings, (_cells(row) for row in rows))
        print_line("`meshwright catalog runs NAME` prints one; every command takes its name in place of a file.")
    if "predictions" in rows[0]:
        _print_predictions(rows)


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    batch = f"{row['global_sequences']:,} x {row['sequence_length']:,}"
    return row["name"], row["task"].value, batch, row["precision"], row["cluster"], row["engine"]


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    headings: dict[str, Align] = {
        "run": "left", "cluster": "left", "plan": "left", "tokens/s/device\n(80 % interval)": "right",
        "GiB\nof": "right",
    }  # fmt: skip
    cells = []
    for row in rows:
        for i, found in enumerate(row["predictions"]):
            tokens = found["tokens_per_s_per_device"]
            cells.append((
                f"{row['name']} {row['precision']}" if i == 0 else "",
                found["cluster"],
                found["plan"],
                f"{rate(tokens.value)} ({rate(tokens.low)}–{rate(tokens.high)})",
                f"{gib(found['reserved_bytes']):.0f} of {gib(found['memory_bytes']):.0f}",
            ))  # fmt: skip
    print_table(headings, cells)
