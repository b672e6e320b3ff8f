"""`meshwright bench device`: GEMMs, attention, memory, training steps and collectives of this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshwright.api.bench import bench_device, device_request
from meshwright.api.question import question_of
from meshwright.cli.output import emit_json, note, print_line, print_table, progress
from meshwright.records.device import DeviceRecorder
from meshwright.targets import load

if TYPE_CHECKING:
    from meshwright.bench.device import DeviceOutcome  # imports PyTorch


def run(*, asked: dict[str, Any], as_json: bool) -> None:
    """Check what is asked for, measure, and print how many points are known. Ctrl-C says how to continue."""
    given = question_of(bench_device).checked(asked)
    with progress("starting PyTorch"):
        request, device, recorder = device_request(**given, command=("meshwright", *sys.argv[1:]))
        measure = load("meshwright.bench.device:measure_device")
    try:
        with progress(f"measuring {recorder.sidecar['device']['name']}", total=request.budget_s) as advance:
            outcome = measure(request, device=device, recorder=recorder, advance=advance)
    except KeyboardInterrupt:
        note(f"{recorder.path} has {len(recorder.done)} of the measurements; continue with --resume")
        raise
    if as_json:
        emit_json(_document(recorder, outcome))
    else:
        _show(recorder, outcome)


def _document(recorder: DeviceRecorder, outcome: DeviceOutcome) -> dict[str, Any]:
    return {
        "records": recorder.path,
        "device": recorder.sidecar["device"],
        "families": {family.value: counts for family, counts in outcome.counts.items()},
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _show(recorder: DeviceRecorder, outcome: DeviceOutcome) -> None:
    print_line(recorder.sidecar["device"]["name"], style="bold")
    print_table(
        {"family": "left", "known to 3 %": "right", "less well": "right", "failed": "right"},
        [(family.value, *counts.values()) for family, counts in outcome.counts.items()],
    )
    print_line(f"Measured in {outcome.seconds:.0f} s; the records are in {recorder.path}.")
    note(*outcome.notes)
