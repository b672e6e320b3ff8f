"""`meshwright tune gemm`: how a run's matrix products are made, measured before and after, kept in a file."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import budget_option, json_option, run_argument, set_option, verb
from meshwright.errors import InputError
from meshwright.specs.run import NATIVE, Run

if TYPE_CHECKING:
    from meshwright.bench.gemm import GemmOutcome, GemmRow
    from meshwright.records.measurement import Measurement
    from meshwright.specs.plan import Plan

KEY = "gemm_tuning"


@verb(
    "gemm",
    examples=[
        "meshwright tune gemm examples/runs/tiny-llama-cpu.yaml",
        "meshwright tune gemm run.yaml --out tuned.json --budget 5m",
        "meshwright tune gemm run.yaml --apply --json",
    ],
)
@run_argument()
@set_option
@click.option(
    "--out", "out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the tuning file.  [default with --write or --apply: the run file's name with .gemm.json]",
)  # fmt: skip
@click.option(
    "--write", "write_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.yaml",
    help="Write the run file with the tuning file named in it.",
)  # fmt: skip
@click.option("--apply", "is_apply", is_flag=True, help="Name the tuning file in RUN.yaml itself.")
@budget_option(default="60s", help="Time to measure for, half of it to try and half to confirm.")
@json_option
def command(
    run_path: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    write_path: Path | None,
    is_apply: bool,
    budget_s: float,
    as_json: bool,
) -> None:
    """Find how the matrix products of a run's model and plan are made fastest on this device.

    Measures each product as it is made now, tries what there is to choose (on a CPU threads and a route for each
    product; on NVIDIA GPUs the library; on AMD GPUs every kernel of rocBLAS and hipBLASLt through PyTorch's
    TunableOp), and measures again, before and after side by side. Only what is surely faster is kept; where nothing
    is, nothing is written. Numbers change by rounding alone: no format is changed, nor the precision of fp32
    products. --out keeps the result as a file, for this device and this version of PyTorch, that a run names as
    gemm_tuning; --apply and --write name it in a run file.
    """
    from meshwright import runfile
    from meshwright.cli.output import emit_json

    _check_targets(run_path, out, write_path, is_apply=is_apply, overrides=overrides)
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError(
            "only the native engine's products are tuned", got=run.engine, hint="--set engine=native"
        )
    require_torch("making matrix products")
    from meshwright.training import device as devices

    device = devices.find_device()
    if run.cluster is not None:
        devices.require(run.cluster.accelerator.name, device=device)
    plan, outcome = _tune(run, device, budget_s=budget_s)
    target = run_path.resolve() if is_apply else write_path
    if out is None and target is not None:
        out = run_path.with_suffix(".gemm.json")
    written = [path for path in (out, target) if path is not None]
    if outcome.choices.is_usual:
        written = []
    elif out is not None:
        text = _run_text(run, out) if target is not None else None  # refused before anything is written
        runfile.write_text(_tuning_text(run, plan, device, outcome), out)
        if text is not None and target is not None:
            runfile.write_text(text, target)
    if as_json:
        emit_json(_document(run, plan, device, outcome, written))
    else:
        _show(run, plan, device, outcome, written)


def _check_targets(
    run_path: Path, out: Path | None, write_path: Path | None, *, is_apply: bool, overrides: tuple[str, ...]
) -> None:
    if is_apply and write_path is not None:
        raise InputError("--apply and --write are both given", allowed="one of them")
    if is_apply and overrides:
        raise InputError(
            "--apply changes the file, and --set lays over it", hint="--write OUT.yaml writes both"
        )
    for path in (out, write_path):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {str(path)!r} (no such folder)")
    if out is not None and out.resolve() in {p.resolve() for p in (run_path, write_path) if p}:
        raise InputError("--out is the run file itself", got=str(out), hint="name another file")


def _tune(run: Run, device: Any, *, budget_s: float) -> tuple[Plan, GemmOutcome]:
    from meshwright.bench.gemm import free_threads, tune
    from meshwright.cli.output import progress
    from meshwright.engines.native import engine
    from meshwright.training.step_gemms import count_gemms

    plan = run.plan or engine.plan_here(run, device=device)
    with progress("making matrix products", total=budget_s) as advance:
        outcome = tune(
            count_gemms(run, plan),
            device=device,
            budget_s=budget_s,
            with_routes=plan.tensor == 1,
            most_threads=free_threads(plan.num_devices),
            advance=advance,
        )
    if plan.tensor > 1 and device.type == "cpu":
        notes = (*outcome.notes, "routes: products that tensor parallelism divides take none")
        outcome = replace(outcome, notes=notes)
    return plan, outcome


def _tuning_text(run: Run, plan: Plan, device: Any, outcome: GemmOutcome) -> str:
    from meshwright.report.documents.json_values import jsonable
    from meshwright.training.gemm_tuning import GemmTuning, conditions, to_text
    from meshwright.training.telemetry import utc_timestamp

    measured = _document(run, plan, device, outcome, [])
    details = {"made": utc_timestamp(time.time()), "command": ["meshwright", *sys.argv[1:]]}
    details |= {key: measured[key] for key in ("run", "plan", "step", "products")}
    found = GemmTuning(conditions=conditions(device), choices=outcome.choices, details=jsonable(details))
    return to_text(found)


def _run_text(run: Run, out: Path) -> str:
    from meshwright import runfile

    wanted = replace(run, gemm_tuning=str(out))
    return runfile.changed_text(run, {KEY: str(out)}, wanted=wanted, what="the tuning file")


# --- the document ---


def _document(run: Run, plan: Plan, device: Any, outcome: GemmOutcome, written: list[Path]) -> dict[str, Any]:
    from meshwright.training.gemm_tuning import conditions

    return {
        "run": run.name,
        "plan": plan.describe(),
        "conditions": conditions(device),
        "tried": outcome.tried,
        "notes": outcome.notes,
        "found": not outcome.choices.is_usual,
        "threads": outcome.choices.threads,
        "library": outcome.choices.library,
        "kernels": len(outcome.choices.tunable_op),
        "step": {
            "before_s": _statistics(outcome.before_s),
            "after_s": _statistics(outcome.after_s),
            "speed_up": _speed_up(outcome.ratio),
        },
        "products": [_row(row) for row in outcome.rows],
        "before": run.gemm_tuning,
        "written": written,
    }


def _row(row: GemmRow) -> dict[str, Any]:
    p = row.product
    m, n, k = p.shape
    return {
        "kernel": p.kernel, "format": p.format, "m": m, "n": n, "k": k, "per_step": row.count, "route": row.route,
        "before_s": _statistics(row.before_s), "after_s": _statistics(row.after_s),
        "speed_up": _speed_up(row.ratio),
    }  # fmt: skip


def _statistics(found: Measurement) -> dict[str, float]:
    low, high = found.interval
    return {"median": found.median, "low": low, "high": high, "n": found.n}


def _speed_up(ratio: Measurement) -> dict[str, float]:
    """Before over after; `ratio` is after over before."""
    low, high = ratio.interval
    return {"median": 1 / ratio.median, "low": 1 / high, "high": 1 / low}


# --- words ---


def _show(run: Run, plan: Plan, device: Any, outcome: GemmOutcome, written: list[Path]) -> None:
    from meshwright.cli.output import note, print_line, print_table
    from meshwright.training.device import device_name
    from meshwright.units import format_seconds

    choices = outcome.choices
    is_shared = not replace(choices, routes={}).is_usual
    print_line(f"{device_name(device)}, {plan.describe()}", style="bold")
    print_table(
        {"product": "left", "m x n x k": "right", "format": "right", "per step": "right", "before": "right",
         "after": "right", "speed-up": "right", "route": "right"},
        [
            (
                row.product.kernel.replace("_", " "), " x ".join(str(size) for size in row.product.shape),
                row.product.format, f"{row.count:,}", format_seconds(row.before_s.median),
                *_after(row, is_changed=row.route is not None or is_shared),
            )
            for row in outcome.rows
        ],
    )  # fmt: skip
    total = f"All products of a step: {format_seconds(outcome.before_s.median)} before"
    if not choices.is_usual:
        after = format_seconds(outcome.after_s.median)
        total += f", {after} after, speed-up {_words(outcome.ratio)}; {outcome.ratio.n} rounds"
    print_line(f"{total}.")
    print_line(f"Tried: {'; '.join(outcome.tried) or 'nothing'}.")
    for caution in outcome.notes:
        note(caution)
    if choices.is_usual:
        print_line("Nothing is surely faster than what is there: nothing is written.", style="bold")
        return
    print_line(f"Found: {choices.describe([row.product for row in outcome.rows])}.", style="bold")
    if not written:
        print_line(
            "Nothing is changed: --out FILE keeps it, --apply and --write OUT.yaml name it in a run file."
        )
    else:
        print_line(
            f"Written: {', '.join(str(path) for path in written)}. {KEY} was: {run.gemm_tuning or 'not set'}."
        )


def _after(row: GemmRow, *, is_changed: bool) -> tuple[str, str, str]:
    """Time, speed-up and route; empty where the product is made as before."""
    from meshwright.units import format_seconds

    if not is_changed:
        return "", "", ""
    return format_seconds(row.after_s.median), _words(row.ratio), row.route or ""


def _words(ratio: Measurement) -> str:
    s = _speed_up(ratio)
    return f"{s['median']:.2f} ({s['low']:.2f} to {s['high']:.2f})"
