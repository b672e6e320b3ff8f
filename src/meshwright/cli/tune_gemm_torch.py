"""The part of `meshwright tune gemm` that imports PyTorch: measure a run's GEMMs and show the faster kernels."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.bench.gemm import GemmOutcome, GemmRow, free_threads, tune
from meshwright.cli.output import note, print_line, print_table, progress
from meshwright.engines.native import engine
from meshwright.json_values import jsonable
from meshwright.records.measurement import Measurement
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.gemm_tuning import GemmTuning, conditions, to_text
from meshwright.training.step_gemms import count_gemms
from meshwright.training.telemetry import utc_timestamp
from meshwright.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class RunTuning:
    """GEMMs of a run before and after tuning, on one device."""

    run: Run
    plan: Plan
    device: Any  # a torch.device
    outcome: GemmOutcome

    @property
    def is_usual(self) -> bool:
        """True if nothing is faster than PyTorch's own choices."""
        return self.outcome.choices.is_usual

    def tuning_text(self) -> str:
        """Text of the tuning file."""
        measured = self.document([])
        details = {"made": utc_timestamp(time.time()), "command": ["meshwright", *sys.argv[1:]]}
        details |= {key: measured[key] for key in ("run", "plan", "step", "products")}
        found = GemmTuning(conditions=conditions(self.device), choices=self.outcome.choices, details=jsonable(details))
        return to_text(found)

    def document(self, written: list[Path]) -> dict[str, Any]:
        """The JSON document. `written`: the files that were written."""
        outcome = self.outcome
        return {
            "run": self.run.name,
            "plan": self.plan.describe(),
            "conditions": conditions(self.device),
            "tried": outcome.tried,
            "notes": outcome.notes,
            "found": not outcome.choices.is_usual,
            "threads": outcome.choices.threads,
            "library": outcome.choices.library,
            "kernels": len(outcome.choices.tunable_op),
            "step": {
                "before_s": outcome.before_s.as_document(),
                "after_s": outcome.after_s.as_document(),
                "speed_up": _speed_up(outcome.ratio),
            },
            "products": [_row(row) for row in outcome.rows],
            "before": self.run.gemm_tuning,
            "written": written,
        }

    def show(self, written: list[Path]) -> None:
        """Print the GEMMs before and after tuning, the trials, and the files."""
        outcome, choices = self.outcome, self.outcome.choices
        print_line(f"{devices.device_name(self.device)}, {self.plan.describe()}", style="bold")
        _show_table(outcome)
        total = f"All GEMMs of a step: {format_seconds(outcome.before_s.median)} before"
        if not choices.is_usual:
            after = format_seconds(outcome.after_s.median)
            total += f", {after} after, speed-up {_speed_up_text(outcome.ratio)}; {outcome.ratio.n} rounds"
        print_line(f"{total}.")
        print_line(f"Tried: {'; '.join(outcome.tried) or 'nothing'}.")
        note(*outcome.notes)
        if choices.is_usual:
            print_line("Nothing is significantly faster: nothing is written.", style="bold")
            return
        print_line(f"Found: {choices.describe([row.gemm for row in outcome.rows])}.", style="bold")
        if not written:
            print_line("Nothing is changed: --out FILE keeps it, --apply and --write OUT.yaml name it in a run file.")
            return
        files, before = ", ".join(str(path) for path in written), self.run.gemm_tuning or "not set"
        print_line(f"Written: {files}. gemm_tuning was: {before}.")


def tune_run(run: Run, *, budget_s: float) -> RunTuning:
    """Measure the GEMMs of a run on this machine's device, and try the alternatives.

    Raises MissingDependencyError if the device is not the run's.
    """
    device = devices.find_device()
    if run.cluster is not None:
        devices.require(run.cluster.accelerator.name, device=device)
    plan = engine.plan_here(run, device=device)
    with progress("measuring GEMMs", total=budget_s) as advance:
        outcome = tune(
            count_gemms(run, plan),
            device=device,
            budget_s=budget_s,
            with_routes=plan.tensor == 1,
            most_threads=free_threads(plan.num_devices),
            advance=advance,
        )
    if plan.tensor > 1 and device.type == "cpu":
        notes = (*outcome.notes, "routes: not available for GEMMs that are sharded by tensor parallelism")
        outcome = replace(outcome, notes=notes)
    return RunTuning(run=run, plan=plan, device=device, outcome=outcome)


def _row(row: GemmRow) -> dict[str, Any]:
    p = row.gemm
    m, n, k = p.shape
    return {
        "kernel": p.kernel, "format": p.format, "m": m, "n": n, "k": k, "per_step": row.count, "route": row.route,
        "before_s": row.before_s.as_document(), "after_s": row.after_s.as_document(),
        "speed_up": _speed_up(row.ratio),
    }  # fmt: skip


def _speed_up(ratio: Measurement) -> dict[str, float]:
    """Before over after; `ratio` is after over before."""
    low, high = ratio.interval
    return {"median": 1 / ratio.median, "low": 1 / high, "high": 1 / low}


def _show_table(outcome: GemmOutcome) -> None:
    is_shared = not replace(outcome.choices, routes={}).is_usual  # a choice for all GEMMs, such as threads
    print_table(
        {"GEMM": "left", "m x n x k": "right", "format": "right", "per step": "right", "before": "right",
         "after": "right", "speed-up": "right", "route": "right"},
        [
            (
                row.gemm.kernel.replace("_", " "), " x ".join(str(size) for size in row.gemm.shape),
                row.gemm.format, f"{row.count:,}", format_seconds(row.before_s.median),
                *_after(row, is_changed=row.route is not None or is_shared),
            )
            for row in outcome.rows
        ],
    )  # fmt: skip


def _after(row: GemmRow, *, is_changed: bool) -> tuple[str, str, str]:
    """Time, speed-up and route; empty for an unchanged GEMM."""
    if not is_changed:
        return "", "", ""
    return format_seconds(row.after_s.median), _speed_up_text(row.ratio), row.route or ""


def _speed_up_text(ratio: Measurement) -> str:
    s = _speed_up(ratio)
    return f"{s['median']:.2f} ({s['low']:.2f} to {s['high']:.2f})"
