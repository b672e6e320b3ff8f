"""Bodies of `meshwright inference`: capacity, estimate, plan, calibrate and accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.answers.cluster import hardware_line
from meshwright.answers.text_table import TextTable
from meshwright.api.inference import (
    inference_accuracy,
    inference_calibrate,
    inference_capacity,
    inference_estimate,
    inference_plan,
)
from meshwright.api.question import ask
from meshwright.cli.output import emit, emit_json, exit_unless, note, print_line, print_table, print_text_tables
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.json_values import jsonable
from meshwright.targets import load
from meshwright.units import gib

if TYPE_CHECKING:
    from meshwright.answers.serving_accuracy import ServingAccuracy
    from meshwright.answers.serving_calibration import ServingCalibrationResult
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.serving_plan import ServingPlan
    from meshwright.specs.hardware import Cluster


SHOWN_LAYOUTS = 8


def capacity(*, asked: dict[str, Any], as_json: bool) -> None:
    """Compute and print. Exits with 1 if nothing fits."""
    found = ask(inference_capacity, asked)
    emit(found, _print_capacity, as_json=as_json)
    exit_unless(found.fits)


def _print_capacity(found: ServingCapacity) -> None:
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
                for c in found.layouts[:SHOWN_LAYOUTS]
            ),
        )
        print_line()
    note(*found.notes)


def print_hardware(cluster: Cluster) -> None:
    """Print what the options state of the cluster's hardware, if anything."""
    if line := hardware_line(cluster):
        print_line(line)


def estimate(
    *, asked: dict[str, Any], drafted: int, draft: str | None, accepted: float | None, as_json: bool,
    ttft_ms: float | None, itl_ms: float | None, **prices: Any,
) -> None:  # fmt: skip
    """Estimate and print."""
    asked |= {"ttft_s": ttft_ms and ttft_ms / 1e3, "itl_s": itl_ms and itl_ms / 1e3}
    found = ask(inference_estimate, asked, prices=prices, drafted=drafted, draft=draft, accepted=accepted or 0.0)
    if as_json:
        emit_json(found.to_dict())
        return
    of = found.server.of
    print_line(
        f"{of.model.name} in {of.weights.name}, {of.cache.name} cache, on {of.cluster.name}: {of.layout.describe()}, "
        f"{found.server.engine.name}, {asked['input_tokens']:,} prompt tokens, "
        f"{asked['output_tokens']:,} answer tokens"
    )
    print_hardware(of.cluster)
    print_text_tables(found.tables())
    if found.price is not None:
        note(f"{found.price.total_usd_per_device_hour:.4g} USD per device-hour: {found.price.source}")
    note(*found.notes)


SHOWN, EXPLAINED = 5, 20


def plan(
    *, asked: dict[str, Any], ttft_ms: float | None, itl_ms: float | None, explain: bool, pareto: bool,
    as_json: bool, **prices: Any,
) -> None:  # fmt: skip
    """Search and print."""
    asked |= {"ttft_s": ttft_ms and ttft_ms / 1e3, "itl_s": itl_ms and itl_ms / 1e3}
    found = ask(inference_plan, asked, prices=prices)
    if as_json:
        emit_json(found.to_dict())
        return
    print_line(found.summary(), style="bold")
    print_hardware(found.question.cluster)
    print_line()
    tables = [found.layout_table(EXPLAINED if explain else SHOWN)]
    tables += [] if (arrivals := found.arrival_table()) is None else [arrivals]
    print_text_tables([*tables, found.front_table()] if pareto else tables)
    _print_price(found)
    note(*found.notes)


def _print_price(found: ServingPlan) -> None:
    price = found.token_price
    if price is None:
        note("no price is known for this accelerator; --price or --capital gives one")
        return
    print_line()
    print_line(
        f"{price.usd_per_million_output:.3g} USD per million output tokens, {price.usd_per_million_total:.3g} per "
        f"million of all; by device time {price.usd_per_million_input_share:.3g} per million prompt tokens and "
        f"{price.usd_per_million_output_share:.3g} per million answer tokens"
    )
    note(f"{price.hour.total_usd_per_device_hour:.4g} USD per device-hour: {price.hour.source}")


def calibrate(*, asked: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Fit, write the file, and show the errors."""
    found = ask(inference_calibrate, asked)
    target = out or Path(f"{found.calibration.engine.name}-{found.calibration.accelerator}.json")
    document = jsonable(load("meshwright.inference.server_fit:to_document")(found.calibration))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r} ({error.strerror})") from None
    if as_json:
        emit_json({"calibration": target, **document})
        return
    _print_calibration(found)
    note(f"wrote {target}")


def _print_calibration(found: ServingCalibrationResult) -> None:
    print_line(found.summary(), style="bold")
    print_line()
    print_text_tables(found.tables())
    for reason, count in found.calibration.unused.items():
        note(f"{count} loads {reason} are not used")


def accuracy(*, asked: dict[str, Any], by: str, show_rows: bool, as_json: bool, **served: str | None) -> None:
    """Predict, compare and print."""
    found = ask(inference_accuracy, asked, **served)
    for reason, count in found.unused_loads.items():
        note(f"{count} loads {reason} are not used")
    if as_json:
        emit_json(found.to_dict())
        return
    tables = found.tables(by)
    print_text_tables([_rows(found), *tables] if show_rows else tables)
    print_line()
    print_line(found.summary())


def _rows(found: ServingAccuracy) -> TextTable:
    rows = []
    for row in found.rows:
        groups = row.point.groups
        about = (row.point.id, groups["model"], groups["accelerator"], groups["engine"])
        if row.point.conditions is None:
            rows.append((*about, "", "", "", "", "", row.point.reason.value if row.point.reason else ""))
            continue
        conditions = row.point.conditions
        layout = conditions.served.layout.describe()
        load = conditions.load
        lengths = f"{load.input_tokens}/{load.output_tokens}"
        in_flight = "full" if load.concurrency is None else f"{load.concurrency:g}"
        rows.append(
            (*about, layout, lengths, in_flight, f"{row.measured:.4g}",
             f"{row.predicted:.4g} ({row.low:.4g} to {row.high:.4g})", f"{100 * row.signed_error:+.0f} %")
        )  # fmt: skip
    headings = (
        "point", "model", "device", "engine", "layout", "lengths", "in flight", "measured", "predicted", "error"
    )  # fmt: skip
    return TextTable(title="", headings=headings, rows=rows, text_columns=("model", "device", "engine", "layout"))
