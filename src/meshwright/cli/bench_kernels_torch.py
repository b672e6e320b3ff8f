"""The part of `meshwright bench kernels` that imports PyTorch: measure, and write the folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.bench.device import DeviceBenchRequest, sidecar_of
from meshwright.bench.kernel_cases import EIGHT_BITS, MAKERS
from meshwright.bench.kernel_routes import RouteOutcome, measure_routes, rows_to_print, tuned_table
from meshwright.cli.output import progress
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.records.device import DeviceRecorder, row_of
from meshwright.records.files import now
from meshwright.records.kernel_routes import SCHEMA
from meshwright.records.points import PointFamily
from meshwright.specs.model import Model
from meshwright.training import device as devices

TOKENS = {"cpu": 256, "cuda": 8192}
FORMATS = {"cpu": ("fp32",), "cuda": ("bf16",)}


def measure(
    ops: Sequence[str] | None,
    models: Sequence[Model],
    *,
    tokens: int | None,
    formats: Sequence[str] | None,
    compiles: bool | None,
    budget_s: float,
    folder: Path,
) -> dict[str, Any]:
    """Time the routes, write the folder; the document that is printed."""
    device = devices.find_device()
    computes = devices.multiplies_fp8(device)
    timed = tuple(op for op in MAKERS if computes or op not in EIGHT_BITS) if ops is None else tuple(ops)
    if absent := [op for op in timed if op not in MAKERS]:
        raise InputError("--ops: not timed here", got=", ".join(absent), allowed=", ".join(MAKERS))
    request = DeviceBenchRequest(
        families=(), budget_s=budget_s, num_processes=(), command=("meshwright", *sys.argv[1:])
    )
    recorder = DeviceRecorder(folder, sidecar=sidecar_of(device, request), resume=True)
    with progress(f"measuring {devices.device_name(device)}", total=budget_s) as advance:
        outcome = measure_routes(
            timed, models, tokens=tokens or TOKENS[device.type], formats=formats or FORMATS[device.type],
            device=device, compiles=device.type == "cuda" if compiles is None else compiles, budget_s=budget_s,
            advance=advance,
        )  # fmt: skip
    _record(outcome, recorder)
    recorder.save(ended=now())
    software = recorder.sidecar["software"]
    table = tuned_table(outcome, device=device)
    table.write(folder / "tuned.json")
    document = {
        "schema": SCHEMA, "device": recorder.sidecar["device"], "driver": recorder.sidecar["driver"],
        "software": software, "command": recorder.sidecar["command"], "started": recorder.sidecar["started"],
        "git_commit": recorder.sidecar["git_commit"], "rows": [row.document() for row in outcome.rows],
    }  # fmt: skip
    write_atomically(folder / "kernels.json", json.dumps(document, indent=1) + "\n")
    notes = [] if device.type == "cuda" else ["peak memory is measured on GPUs"]
    return document | {"folder": folder, "notes": notes, "table": list(rows_to_print(outcome.rows))}


def _record(outcome: RouteOutcome, recorder: DeviceRecorder) -> None:
    """Add the fastest routes to the records of the device, where they have a point there."""
    for case, row in outcome.cases:
        if case.point is None or row.forward_s is None:
            continue
        points = [(case.point, row.forward_s)]
        if case.point.family is PointFamily.ATTENTION and row.backward_s is not None:
            points.append((replace(case.point, kernel="backward"), row.backward_s))
        for point, found in points:
            if point not in recorder.done:
                recorder.append(row_of(point, found))
