"""`meshwright mlperf run`: check what is asked for, take the runs, and report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from meshwright.api.question import ask
from meshwright.api.run_benchmark import mlperf_run, plan_benchmark, rate_of_shape
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.training.cpu_libraries import require_torch
from meshwright.units import format_duration

Progress = Callable[[str], None]


def run(*, asked: dict[str, Any], is_shape: bool, num_steps: int, dry_run: bool, as_json: bool) -> None:
    """Take the runs, or those that are missing, and print them."""
    require_torch("training")
    if is_shape:
        given = {name: asked[name] for name in ("name", "round_name", "overrides")}
        document = rate_of_shape(**given, num_steps=num_steps, dry_run=dry_run)
        _show_shape(document, as_json=as_json)
        return
    if dry_run:
        _show_plan(plan_benchmark(**asked), as_json=as_json)
        return
    done = ask(mlperf_run, asked, say=lambda line: print(line, file=sys.stderr, flush=True))
    document = done.to_dict()
    if as_json:
        emit_json(document)
    else:
        _show(document)
    if document["num_converged"] < document["num_runs"] - (1 if document["num_runs"] > 2 else 0):
        raise click.exceptions.Exit(1)


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
        {"run": "right", "seed": "right", "status": "left", "samples": "right", "loss": "right", "minutes": "right"},
        [
            (r["index"], r["seed"], r["status"], f"{r['samples']:,}", f"{r['loss']:.4f}", f"{r['minutes']:.3f}")
            for r in document["runs"]
        ],
    )
    if document["raw_min"] is not None:
        print_line(f"Olympic mean: {document['raw_min']:.3f} min, raw.", style="bold")
    print_line(f"{document['num_converged']} of {document['num_runs']} runs reached {document['target']:g}.")
    print_line(document["label"])
    if document["missing_system_fields"]:
        note(f"the machine does not tell: {', '.join(document['missing_system_fields'])}; give them with --system FILE")
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
