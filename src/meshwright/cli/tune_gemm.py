"""`meshwright tune gemm`: check what is asked for, and write what `tune_gemm_torch` finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.cli.output import emit_json, load_with_torch
from meshwright.cli.run_input import tuned_run
from meshwright.errors import InputError
from meshwright.specs.run import Run


def run(*, run_path: Path, out: Path | None, budget_s: float, as_json: bool, **files: Any) -> None:
    """Measure, write the files asked for if anything is faster, and print the result.

    `files` are further options of the run file.
    """
    run, target = tuned_run("GEMMs are", out, run_path=run_path, **files)
    if out is not None and out.resolve() in {p.resolve() for p in (run_path, target) if p}:
        raise InputError("--out is the run file itself", got=str(out), hint="name another file")
    tune = load_with_torch("meshwright.cli.tune_gemm_torch:tune_run", what="tuning GEMMs")
    found = tune(run, budget_s=budget_s)
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
