"""`meshwright tune dataloader`: check what is asked for; `tune_dataloader_torch` measures."""

from __future__ import annotations

from pathlib import Path

from meshwright import runfile
from meshwright.cli.output import emit_json, load_with_torch
from meshwright.cli.run_input import check_targets
from meshwright.errors import InputError
from meshwright.specs.run import NATIVE


def run(
    *,
    run_path: Path,
    overrides: tuple[str, ...],
    counts: tuple[int, ...] | None,
    step_s: float | None,
    budget_s: float,
    write_path: Path | None,
    is_apply: bool,
    as_json: bool,
) -> None:
    """Measure, write the counts if asked to, and print them."""
    check_targets(write_path, is_apply=is_apply, overrides=overrides)
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError("only the native engine's data loading is tuned", got=run.engine, hint="--set engine=native")
    tune = load_with_torch("meshwright.cli.tune_dataloader_torch:tune_run", what="measuring data loading")
    found = tune(run, counts=counts, step_s=step_s, budget_s=budget_s)
    target = run_path.resolve() if is_apply else write_path
    if target is not None:
        runfile.write_text(found.text(), target)
    if as_json:
        emit_json(found.document(target))
    else:
        found.show(target)
