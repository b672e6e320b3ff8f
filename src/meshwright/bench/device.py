"""Measure one device within a time budget: family by family, each point kept as soon as it is known.

A point that fails (out of memory, a kernel that is not there, a clock that makes no sense) is a line that says so, and
the measuring goes on. A device that no longer answers ends it, with everything that was measured kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.collectives import Exchanges, measure_exchanges
from meshwright.bench.harness import AbsurdClockError, measure
from meshwright.bench.kernels import footprint_bytes, formats_of, task_of
from meshwright.bench.points import SHARES, Family, Point, Workload, points_of
from meshwright.bench.recordfile import driver_version
from meshwright.bench.records import Recorder, Row, Status, failed, row_of
from meshwright.bench.sensors import read_sensors
from meshwright.engines.native import device as devices
from meshwright.engines.native.processes import WorkerLostError, run_ranks
from meshwright.engines.native.telemetry import git_commit, moment, software_facts
from meshwright.errors import MeshwrightError

POINTS_A_FAMILY = 80
"""Into so many the time of a family is divided: more shapes tell more than one shape known better."""

LONGEST_POINT_S = 2.0
MEMORY_SHARE = 0.4  # of the device's memory that the operands of one point may take
CAUTION = 3.0
"""Calls of a point for which there must be time when it is begun: its two first calls cannot be stopped."""

Advance = Callable[[float], None]


class DeviceLostError(MeshwrightError):
    """The device no longer answers."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure, and for how long."""

    families: Sequence[Family]
    budget_s: float
    num_processes: int
    workload: Workload | None = None
    command: Sequence[str] = ()


@dataclass(kw_only=True)
class Outcome:
    """How many points of each family ended how."""

    counts: dict[Family, dict[Status, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, family: Family, status: Status) -> None:
        of = self.counts.setdefault(family, dict.fromkeys(Status, 0))
        of[status] += 1


def sidecar_of(device: torch.device, request: Request) -> dict[str, Any]:
    """What the records are of; no name of a host or a user."""
    return {
        "device": {
            "accelerator": devices.known_name(device),
            "type": device.type,
            "name": devices.device_name(device),
            "count": devices.num_devices(device),
            "memory_bytes": devices.memory_bytes(device),
            "compute_units": _compute_units(device),
            "threads": torch.get_num_threads(),
        },
        "driver": driver_version(device.type),
        "software": software_facts(),
        "command": list(request.command),
        "started": moment(time.time()),
        "ended": None,
        "git_commit": git_commit(Path.cwd()),
        "budget_s": request.budget_s,
    }


def measure_device(
    request: Request, *, device: torch.device, recorder: Recorder, advance: Advance = lambda seconds: None
) -> Outcome:
    """Measure what `recorder` does not hold yet.

    Raises DeviceLostError and KeyboardInterrupt; what was measured until then is kept.
    """
    outcome = Outcome()
    start_s = time.perf_counter()
    families = [f for f in Family if f in request.families]
    try:
        for i, family in enumerate(families):
            before_s = time.perf_counter()
            left_s = request.budget_s - (before_s - start_s)
            budget_s = left_s * SHARES[family] / sum(SHARES[f] for f in families[i:])
            _measure_family(family, request, device, recorder, outcome, budget_s=max(0.0, budget_s))
            advance(time.perf_counter() - before_s)
    finally:
        outcome.seconds = time.perf_counter() - start_s
        recorder.close(ended=moment(time.time()))
    return outcome


def _measure_family(
    family: Family,
    request: Request,
    device: torch.device,
    recorder: Recorder,
    outcome: Outcome,
    *,
    budget_s: float,
) -> None:
    if family is Family.TRANSFER and device.type == "cpu":
        outcome.notes.append("transfer: the CPU is its own host")
        return
    points = points_of(
        family,
        device_type=device.type,
        formats=_formats(request, device),
        workload=request.workload,
        num_processes=request.num_processes,
    )
    left = (p for p in points if p not in recorder.done)
    if family is Family.COLLECTIVES:
        _measure_collectives(tuple(left), request, device, recorder, outcome, budget_s=budget_s)
        return
    until_s, point_s = time.perf_counter() + budget_s, min(LONGEST_POINT_S, budget_s / POINTS_A_FAMILY)
    most_bytes = MEMORY_SHARE * devices.memory_bytes(device)
    largest, s_per_work, num_skipped = 0.0, 0.0, 0
    for point in left:
        left_s, work = until_s - time.perf_counter(), max(1.0, point.flops + point.bytes)
        if left_s <= 0:
            break
        if footprint_bytes(point) > most_bytes or CAUTION * work * s_per_work > left_s:
            num_skipped += 1
            continue
        row = _measured(point, device, budget_s=point_s)
        recorder.append(row)
        outcome.count(family, row.status)
        if row.status is Status.FAILED and not _answers(device):
            raise DeviceLostError(f"the device was lost: {row.reason}", hint=_again(recorder))
        if row.status is not Status.FAILED and work >= largest:
            largest, s_per_work = work, row.seconds_median / work
    if num_skipped:
        outcome.notes.append(f"{family}: {num_skipped} points are too large for the memory or the time left")


def _formats(request: Request, device: torch.device) -> list[str]:
    """Those that the workload uses, else all that the device multiplies."""
    wanted = request.workload.formats if request.workload is not None else None
    return [name for name in formats_of(device) if wanted is None or name in wanted]


def _again(recorder: Recorder) -> str:
    return f"{len(recorder.done)} measurements are in {recorder.path}; go on with --resume"


def _measured(point: Point, device: torch.device, *, budget_s: float) -> Row:
    try:
        task = task_of(point, device)
        found = measure(
            task.run,
            before=task.before,
            synchronize=lambda: devices.synchronize(device),
            budget_s=budget_s,
        )
    except AbsurdClockError as error:
        return failed(point, error.message)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for nearly all
        return failed(point, str(error).partition("\n")[0] or type(error).__name__)
    sensors = read_sensors(device)
    return row_of(point, found, clock_hz=sensors.clock_hz, temperature_c=sensors.temperature_c)


def _answers(device: torch.device) -> bool:
    """Whether the device still adds one and one."""
    try:
        one = torch.ones(1, device=device)
        return bool((one + one).item() == 2)
    except RuntimeError:
        return False


def _measure_collectives(
    points: tuple[Point, ...],
    request: Request,
    device: torch.device,
    recorder: Recorder,
    outcome: Outcome,
    *,
    budget_s: float,
) -> None:
    """In processes of their own; to start them is no part of the budget."""
    if request.num_processes == 1:
        outcome.notes.append("collectives: one process has nobody to exchange with")
        return
    told = Exchanges(
        points=points,
        recorder=recorder,
        device_type=device.type,
        budget_s=budget_s,
        point_s=min(LONGEST_POINT_S, budget_s / POINTS_A_FAMILY),
    )
    try:
        run_ranks(measure_exchanges, told, num_ranks=request.num_processes, device_type=device.type)
    except WorkerLostError as error:
        if error.was_asked_to_stop:
            raise KeyboardInterrupt from None
        outcome.notes.append(f"collectives: {error.message}")
    finally:
        for row in recorder.added_by_others():
            outcome.count(Family.COLLECTIVES, row.status)


def _compute_units(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 0
