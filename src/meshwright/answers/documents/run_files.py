"""The JSON document of `meshwright catalog runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.result import Advance, ignore

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate


def run_files_document(name: str | None, *, predict: bool = False, advance: Advance = ignore) -> dict[str, Any]:
    """All run files, or the one called `name` with its text; with `predict`, an estimate on each published device.

    `advance(1)` is called after each predicted run file.
    """
    from meshwright.catalog.lookup import run_file_names, run_file_text

    names = run_file_names() if name is None else (name,)
    rows = [_row(one, run_file_text(one)) | ({} if name is None else {"text": run_file_text(one)}) for one in names]
    if predict:
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
    from meshwright.answers.shipped_runs import on_each_device

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
