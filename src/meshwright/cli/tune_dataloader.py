"""`meshwright tune dataloader`: check what is asked for; `tune_dataloader_torch` measures."""

from __future__ import annotations

from typing import Any

from meshwright import runfile
from meshwright.cli.output import emit_json, load_with_torch
from meshwright.cli.run_input import tuned_run


def run(*, counts: tuple[int, ...] | None, step_s: float | None, budget_s: float, as_json: bool, **files: Any) -> None:
    """Measure, write the counts if asked to, and print them. `files` are options of the run file."""
    run, target = tuned_run("data loading is", **files)
    tune = load_with_torch("meshwright.cli.tune_dataloader_torch:tune_run", what="measuring data loading")
    found = tune(run, counts=counts, step_s=step_s, budget_s=budget_s)
    if target is not None:
        runfile.write_text(found.text(), target)
    if as_json:
        emit_json(found.document(target))
    else:
        found.show(target)
