"""`meshwright mlperf run`: check what is asked for, take the runs, and report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from meshwright.api.run_benchmark import mlperf_run, plan_benchmark, rate_of_shape
from meshwright.cli.needs import require_torch
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.errors import InputError
from meshwright.units import format_duration

Progress = Callable[[str], None]


def run(
    *,
    name: str,
    folder: Path | None,
    num_runs: int | None,
    round_name: str | None,
    division: str,
    overrides: tuple[str, ...],
    data: Path | None,
    weights: Path | None,
    org: str,
    platform: str | None,
    system: Path | None,
    seeds: str | None,
    warm_up_steps: int | None,
    num_concurrent: int | None,
    launcher: str | None,
    is_shape: bool,
    num_steps: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take the runs, or those that are missing, and print them."""
    require_torch("training")
    if is_shape:
        document = rate_of_shape(
            name, round_name=round_name, overrides=overrides, num_steps=num_steps, dry_run=dry_run
        )
        _show_shape(document, as_json=as_json)
        return
    given: dict[str, Any] = {
        "out": folder, "num_runs": num_runs, "round_name": round_name, "division": division, "overrides": overrides,
        "data": data, "weights": weights, "org": org, "platform": platform, "system": system,
        "seeds": _seeds(seeds), "warm_up_steps": warm_up_steps, "num_concurrent": num_concurrent,
        "launcher": _arguments(launcher),
    }  # fmt: skip
    if dry_run:
        _show_plan(plan_benchmark(name, **given), as_json=as_json)
        return
    done = mlperf_run(name, **given, say=lambda line: print(line, file=sys.stderr, flush=True))
    document = done.to_dict()
    if as_json:
        emit_json(document)
    else:
        _show(document)
    if document["num_converged"] < document["num_runs"] - (1 if document["num_runs"] > 2 else 0):
        raise click.exceptions.Exit(1)


def _arguments(text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise InputError(
            f"--launcher: {error}", got=text, allowed="a command, quoted as for a shell"
        ) from None


def _seeds(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError("--seeds", got=text, allowed="whole numbers, separated by commas") from None
    if any(not 0 <= seed <= 10**9 for seed in seeds):
        raise InputError("--seeds", got=text, allowed="0 to 1,000,000,000")
    return seeds


def _show_plan(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(document)
        return
    for line in document["notes"]:
        note(line)
    print_line(
        f"{document['benchmark']}, round {document['round']}: {document['num_runs']} runs, "
        f"{document['num_concurrent']} side by side, {document['warm_up_steps']} warm-up steps each. "
        "Nothing was trained. The run file:",
        style="bold",
    )
    click.echo(document["run_file"])


def _show(document: dict[str, Any]) -> None:
    for line in document["notes"]:
        note(line)
    print_table(
        {
            "run": "right",
            "seed": "right",
            "status": "left",
            "samples": "right",
            "loss": "right",
            "minutes": "right",
        },
        [
            (
                r["index"],
                r["seed"],
                r["status"],
                f"{r['samples']:,}",
                f"{r['loss']:.4f}",
                f"{r['minutes']:.3f}",
            )
            for r in document["runs"]
        ],
    )
    if document["raw_min"] is not None:
        print_line(f"Olympic mean: {document['raw_min']:.3f} min, raw.", style="bold")
    print_line(f"{document['num_converged']} of {document['num_runs']} runs reached {document['target']:g}.")
    print_line(document["label"])
    if document["missing_system_fields"]:
        note(
            f"the machine does not tell: {', '.join(document['missing_system_fields'])}; give them with --system FILE"
        )
    print_line(
        f"Check and score: meshwright mlperf check {document['folder']}, meshwright mlperf score {document['folder']}"
    )


def _show_shape(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(document)
        return
    for line in document["notes"]:
        note(line)
    if document["tokens_per_s_per_device"] is None:
        print_line(f"Memory: {document['memory']}. Nothing was trained.")
    else:
        mfu = "unknown" if document["mfu"] is None else f"{100 * document['mfu']:.1f} %"
        print_line(
            f"{document['steps']} steps of {document['model']}: {document['tokens_per_s_per_device']:,.0f} "
            f"tokens/s/device, MFU {mfu} ({document['mfu_convention']}), step {format_duration(document['step_s'])}.",
            style="bold",
        )
    print_line(document["label"])
