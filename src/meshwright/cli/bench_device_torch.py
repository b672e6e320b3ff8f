"""The part of `meshwright bench device` that imports PyTorch: measure this machine's device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.bench.device import DeviceBenchRequest, DeviceOutcome, fewer_threads, measure_device, sidecar_of
from meshwright.cli.output import note, progress
from meshwright.errors import InputError
from meshwright.records.device import DeviceRecorder
from meshwright.records.points import PointFamily, Workload
from meshwright.training import device as devices

ON_CPU = (2, 4)
"""Numbers of processes that are measured on a CPU."""


def measure(
    families: Sequence[PointFamily],
    *,
    workload: Workload | None,
    budget_s: float,
    folder: Path,
    resume: bool,
    num_processes: tuple[int, ...] | None,
) -> tuple[DeviceRecorder, DeviceOutcome]:
    """Measure the device and keep the records in `folder`. Ctrl-C says how to continue."""
    found = devices.find_device()
    request = DeviceBenchRequest(
        families=families,
        budget_s=budget_s,
        num_processes=num_processes or ON_CPU,
        workload=workload,
        command=("meshwright", *sys.argv[1:]),
    )
    request = replace(request, threads=fewer_threads(request.num_processes))
    if found.type == "cuda":
        request = _on_gpus(request, devices.num_devices(found), asked=num_processes)
    recorder = DeviceRecorder(folder, sidecar=sidecar_of(found, request), resume=resume)
    try:
        with progress(f"measuring {devices.device_name(found)}", total=budget_s) as advance:
            outcome = measure_device(request, device=found, recorder=recorder, advance=advance)
    except KeyboardInterrupt:
        note(f"{len(recorder.done)} measurements are in {recorder.path}; continue with --resume")
        raise
    return recorder, outcome


def _on_gpus(request: DeviceBenchRequest, num_gpus: int, *, asked: tuple[int, ...] | None) -> DeviceBenchRequest:
    if asked is not None and max(asked) > num_gpus:
        raise InputError("--processes is more than there are GPUs", got=max(asked), allowed=f"<= {num_gpus}")
    counts = [2**power for power in range(1, num_gpus.bit_length()) if 2**power < num_gpus]
    return replace(request, num_processes=asked or (*counts, num_gpus))
