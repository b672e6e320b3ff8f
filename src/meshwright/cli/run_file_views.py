"""Run files that ship in `meshwright catalog runs`: what they say, and what to expect of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import print_line, print_table, progress

if TYPE_CHECKING:
    from meshwright.cli.output import Align
    from meshwright.report.run_estimate import RunEstimate


def run_files_document(name: str | None, *, predict: bool) -> dict[str, Any]:
    """All run files, or the one called `name` with its text; with `predict`, on each device of their documents."""
    from meshwright.catalog import run_file_names, run_file_text

    names = run_file_names() if name is None else (name,)
    rows = [
        _row(one, run_file_text(one)) | ({} if name is None else {"text": run_file_text(one)})
        for one in names
    ]
    if predict:
        with progress("predicting", total=len(rows)) as advance:
            for row in rows:
                row["predictions"] = _predictions(row["name"])
                advance(1)
    return {"runs": rows} if name is None else rows[0]


def _row(name: str, text: str) -> dict[str, Any]:
    from meshwright import runfile

    run = runfile.loads(text, file=f"{name}.yaml")
    return {
        "name": name,
        "model": run.model.name,
        "task": run.task,
        "sequence_length": run.sequence_length,
        "global_sequences": run.global_batch,
        "precision": run.precision.name,
        "cluster": run.cluster_name,
        "engine": run.engine,
    }


def _predictions(name: str) -> list[dict[str, Any]]:
    from meshwright.report.shipped_runs import on_each_device

    return [_prediction(done) for done in on_each_device(name)]


def _prediction(done: RunEstimate) -> dict[str, Any]:
    step = done.estimate.step
    return {
        "cluster": done.run.cluster_name,
        "plan": done.plan.describe(),
        "tokens_per_s_per_device": step.tokens_per_s_per_device,
        "reserved_bytes": step.memory.reserved_bytes,
        "memory_bytes": step.memory.capacity_bytes,
    }


def print_run_files(document: dict[str, Any]) -> None:
    """A table of all, or the text of one; then what was predicted."""
    rows = document.get("runs", [document])
    if "text" in document:
        sys.stdout.write(document["text"])
    elif "predictions" not in rows[0]:
        headings: dict[str, Align] = {
            "run": "left", "task": "left", "batch": "right", "precision": "left", "cluster": "left", "engine": "left",
        }  # fmt: skip
        print_table(headings, (_cells(row) for row in rows))
        print_line("`meshwright catalog runs NAME` prints one; every command takes its name for a file's.")
    if "predictions" in rows[0]:
        _print_predictions(rows)


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    batch = f"{row['global_sequences']:,} x {row['sequence_length']:,}"
    return row["name"], row["task"].value, batch, row["precision"], row["cluster"], row["engine"]


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    from meshwright.report.quantities import rate
    from meshwright.units import gib

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
