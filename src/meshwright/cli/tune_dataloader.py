"""`meshwright tune dataloader`: check what is asked for; `tune_dataloader_torch` measures."""

from __future__ import annotations

from pathlib import Path

from meshwright import runfile
from meshwright.cli.needs import load_with_torch
from meshwright.cli.output import emit_json
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
    if is_apply and write_path is not None:
        raise InputError("--apply and --write are both given", allowed="one of them")
    if is_apply and overrides:
        raise InputError(
            "--apply changes the file, and --set changes the run only", hint="--write OUT.yaml writes both"
        )
    if write_path is not None and not write_path.parent.is_dir():
        raise InputError(f"cannot write {str(write_path)!r} (no such folder)")
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError(
            "only the native engine's data loading is tuned", got=run.engine, hint="--set engine=native"
        )
    tune = load_with_torch("meshwright.cli.tune_dataloader_torch:tune_run", what="measuring data loading")
    found = tune(run, counts=counts, step_s=step_s, budget_s=budget_s)
    target = run_path.resolve() if is_apply else write_path
    if target is not None:
        runfile.write_text(found.text(), target)
    if as_json:
        emit_json(found.document(target))
    else:
        found.show(target)
