"""`meshwright tune learning-rate`: check what is asked for, measure, and write the rate if asked to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.cli.output import emit_json, load_with_torch, note, print_line, print_table, write_html
from meshwright.cli.run_input import tuned_run
from meshwright.errors import InputError
from meshwright.records.rate_range import RateRange
from meshwright.specs.run import Run

ROWS = 12  # of the table


def run(*, low: float, high: float, num_steps: int, html_path: Path | None, as_json: bool, **files: Any) -> None:
    """Measure, write the files asked for if there is a suggestion, and print the result.

    `files` are options of the run file.
    """
    _check_range(low, high)
    run, target = tuned_run("rate is", html_path, **files)
    test = load_with_torch(
        "meshwright.engines.native.rate_range_test:run_range_test", what="a learning-rate range test"
    )
    found: RateRange = test(run, num_steps=num_steps, low=low, high=high)
    values = _values(run, found)
    if not values:
        target = None
    elif target is not None:
        runfile.write_text(_text(run, values), target)
    write_html("meshwright.report.learning_rate_page:learning_rate_page", found, run=run, path=html_path)
    if as_json:
        emit_json(_document(run, found, values=values, written=target))
    else:
        _show(run, found, values=values, written=target)


def _check_range(low: float, high: float) -> None:
    for option, rate in (("--from", low), ("--to", high)):
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"{option} is no learning rate", got=rate, allowed="a number above 0")
    if low >= high:
        raise InputError("--from is not below --to", got=f"{low:g} to {high:g}")


def _values(run: Run, found: RateRange) -> dict[str, float]:
    """Keys of the run file that the suggestion sets; empty: there is none. Both rates of Muon rise together."""
    if found.suggested is None:
        return {}
    values = {"optimizer.learning_rate": found.suggested}
    adamw = run.optimizer.adamw_learning_rate
    if adamw is not None:
        own = float(f"{found.suggested * adamw / run.optimizer.learning_rate:.1e}")
        values["optimizer.adamw_learning_rate"] = own
    return values


def _text(run: Run, values: dict[str, float]) -> str:
    fields = {key.partition(".")[2]: value for key, value in values.items()}
    wanted = replace(run, optimizer=replace(run.optimizer, **fields))
    return runfile.changed_text(run, values, wanted=wanted, what="the learning rate")


def _document(run: Run, found: RateRange, *, values: dict[str, float], written: Path | None) -> dict[str, Any]:
    steps = zip(found.rates, found.losses, found.smoothed, strict=True)
    return {
        "run": run.name,
        "optimizer": run.optimizer.name,
        "before": run.optimizer.learning_rate,
        "suggested": found.suggested,
        "steepest": found.steepest,
        "divergence": found.divergence,
        "values": values,
        "steps": [
            {"learning_rate": rate, "loss": _number(loss), "smoothed": _number(smoothed)}
            for rate, loss, smoothed in steps
        ],
        "written": written,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(run: Run, found: RateRange, *, values: dict[str, float], written: Path | None) -> None:
    every = max(1, -(-len(found.rates) // ROWS))
    rows = list(zip(found.rates, found.losses, found.smoothed, strict=True))
    shown = [*rows[:-1:every], rows[-1]]
    print_table(
        {"learning rate": "right", "loss": "right", "smoothed": "right"},
        [(f"{rate:.2e}", f"{loss:.4f}", f"{smoothed:.4f}") for rate, loss, smoothed in shown],
    )
    if found.divergence is None:
        note(f"the loss did not diverge up to {found.end:g}: a larger --to shows where it does")
    if not values:
        print_line("Nothing is suggested, nothing is written: the loss does not fall within this range.", style="bold")
        return
    end = "" if found.divergence is None else f", divergence at {found.divergence:.1e}"
    print_line(
        f"Suggested peak for {run.optimizer.name}: {found.suggested:.1e} "
        f"(steepest descent at {found.steepest:.1e}{end}).",
        style="bold",
    )
    for key, value in values.items():
        print_line(f"{key}: {value:g}" if written else f"Nothing is changed: --apply and --write set {key}={value:g}.")
    if written is not None:
        print_line(f"Written: {written}. The learning rate was {run.optimizer.learning_rate:g}.")
