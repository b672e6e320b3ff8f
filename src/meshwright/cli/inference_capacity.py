"""`meshwright inference capacity`: sessions and tokens that fit into memory."""

from __future__ import annotations

from typing import Any

import click

from meshwright.answers.serving_capacity import ServingCapacity
from meshwright.api.inference import inference_capacity
from meshwright.api.question import ask
from meshwright.cli.inference_estimate import print_hardware
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.units import gib

SHOWN = 8


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Compute and print. Exits with 1 if nothing fits."""
    found = ask(inference_capacity, asked)
    if as_json:
        emit_json(found.to_dict())
    else:
        _print(found)
    if not found.fits:
        raise click.exceptions.Exit(1)


def _print(found: ServingCapacity) -> None:
    document, device = found.to_dict(), found.best.device
    print_line(found.summary(), style="bold")
    print_hardware(found.question.cluster)
    print_line()
    print_table(
        {"of a device": "left", "GiB": "right"},
        [
            ("memory", f"{gib(device.total):.1f}"),
            ("usable", f"{gib(device.usable):.1f}"),
            (f"weights, {document['precision']}", f"{gib(device.weights):.1f}"),
            ("activations of a step", f"{gib(device.activations):.1f}"),
            ("workspaces, context, communicators", f"{gib(device.workspace + device.communicators):.1f}"),
            (f"left for the {document['kv_precision']} cache", f"{gib(device.cache):.1f}"),
        ],
    )
    print_line()
    if len(found.layouts) > 1:
        print_table(
            {"layout": "left", "sessions": "right", "tokens": "right", "copies of the cache": "right"},
            (
                (c.layout.describe(), f"{c.max_sessions:,}", f"{c.max_tokens:,}", f"{c.cache_copies:g}")
                for c in found.layouts[:SHOWN]
            ),
        )
        print_line()
    for line in found.notes:
        note(line)
