"""`meshwright tune gemm`: check what is asked for, and write what `tune_gemm_torch` finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright import runfile
from meshwright.cli.output import emit_json, load_with_torch
from meshwright.cli.run_input import check_targets
from meshwright.errors import InputError
from meshwright.specs.run import NATIVE, Run


def run(
    *,
    run_path: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    write_path: Path | None,
    is_apply: bool,
    budget_s: float,
    as_json: bool,
) -> None:
    """Measure, write the files asked for if anything is faster, and print the result."""
    check_targets(write_path, out, is_apply=is_apply, overrides=overrides)
    if out is not None and out.resolve() in {p.resolve() for p in (run_path, write_path) if p}:
        raise InputError("--out is the run file itself", got=str(out), hint="name another file")
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError("only the native engine's GEMMs are tuned", got=run.engine, hint="--set engine=native")
    tune = load_with_torch("meshwright.cli.tune_gemm_torch:tune_run", what="tuning GEMMs")
    found = tune(run, budget_s=budget_s)
    target = run_path.resolve() if is_apply else write_path
    if out is None and target is not None:
        out = run_path.with_suffix(".gemm.json")
    written = [path for path in (out, target) if path is not None]
    if found.is_usual:
        written = []
    elif out is not None:
        text = _run_text(run, out) if target is not None else None  # may refuse, before anything is written
        runfile.write_text(found.tuning_text(), out)
        if text is not None and target is not None:
            runfile.write_text(text, target)
    if as_json:
        emit_json(found.document(written))
    else:
        found.show(written)


def _run_text(run: Run, out: Path) -> str:
    wanted = replace(run, gemm_tuning=str(out))
    return runfile.changed_text(run, {"gemm_tuning": str(out)}, wanted=wanted, what="the tuning file")
