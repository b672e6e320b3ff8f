"""Measure one device within a time budget, family by family. Each point is recorded as soon as it is measured.

Whole steps are measured in windows that are spread over the whole time: a CPU has periods of ten to thirty seconds in
which everything takes longer. Steps of one process are repeated in each of their windows; steps of several processes,
which take long, continue where the last window ended.

A point that fails (out of memory, a missing kernel, an impossible clock) becomes a line with the reason, and the
measurement continues. A device that no longer responds ends it; everything measured before is kept.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.collectives import PointsTogether, measure_together
from meshwright.bench.harness import AbsurdClockError, measure
from meshwright.bench.kernels import footprint_bytes, formats_of, task_of
from meshwright.errors import MeshwrightError
from meshwright.records.device import DeviceRecorder, DeviceRow, PointStatus, busy_note, failed, row_of
from meshwright.records.files import driver_version, now
from meshwright.records.points import COLLECTIVES_SHARE, SHARES, TOGETHER_SHARE, Point, PointFamily, Workload, points_of
from meshwright.result import Advance, ignore
from meshwright.training import device as devices
from meshwright.training.host_load import busy_now
from meshwright.training.processes import WorkerLostError, run_ranks
from meshwright.training.telemetry import git_commit, software_facts

POINTS_A_FAMILY = 80
"""Least number of points in the time of a family. More shapes give more information than one shape with less noise."""

TRAININGS = 24
"""Least number of whole steps, which take longer and whose shapes differ less."""
WINDOWS, WINDOWS_TOGETHER = 3, 2
"""Windows for whole steps of one process and of several."""
TOGETHER = (PointFamily.COLLECTIVES, PointFamily.TRAINING)
THREADED = (PointFamily.GEMM, PointFamily.ATTENTION, PointFamily.MEMORY, PointFamily.ELEMENTWISE, PointFamily.OPTIMIZER)
"""Families that are also measured with fewer threads, as each of several processes on one CPU has."""

LONGEST_POINT_S = 2.0
MEMORY_SHARE = 0.4  # of the device's memory, limit for the operands of one point
CAUTION = 3.0
"""A point starts only if there is time for this many calls: its first two calls cannot be stopped."""


class DeviceLostError(MeshwrightError):
    """The device no longer responds."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class DeviceBenchRequest:
    """Points to measure, and the time for them."""

    families: Sequence[PointFamily]
    budget_s: float
    num_processes: Sequence[int]  # of collectives and training, one after the other; 1 is ignored
    threads: Sequence[int] = ()  # further numbers of CPU threads for kernels, in addition to all
    workload: Workload | None = None
    command: Sequence[str] = ()


@dataclass(kw_only=True)
class DeviceOutcome:
    """Numbers of points by family and status."""

    counts: dict[PointFamily, dict[PointStatus, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, family: PointFamily, status: PointStatus) -> None:
        of = self.counts.setdefault(family, dict.fromkeys(PointStatus, 0))
        of[status] += 1


def fewer_threads(num_processes: Sequence[int]) -> tuple[int, ...]:
    """Threads of one of `num_processes` processes on this CPU, without the number of all cores."""
    cores = torch.get_num_threads()
    return tuple(sorted({max(1, cores // count) for count in num_processes} - {cores}, reverse=True))


def sidecar_of(device: torch.device, request: DeviceBenchRequest) -> dict[str, Any]:
    """Origin of the records, without the name of a host or user."""
    is_gpu = device.type == "cuda"
    return {
        "device": {
            "accelerator": devices.catalog_name(device), "type": device.type, "name": devices.device_name(device),
            "count": devices.num_devices(device), "memory_bytes": devices.memory_bytes(device),
            "compute_units": torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 0,
            "threads": torch.get_num_threads(),
        },
        "driver": driver_version(device.type), "software": software_facts(), "command": list(request.command),
        "started": now(), "ended": None, "git_commit": git_commit(Path.cwd()), "budget_s": request.budget_s,
        "busy": busy_now(),
    }  # fmt: skip


def measure_device(
    request: DeviceBenchRequest, *, device: torch.device, recorder: DeviceRecorder, advance: Advance = ignore
) -> DeviceOutcome:
    """Measure all points that `recorder` does not hold yet.

    Raises DeviceLostError and KeyboardInterrupt; everything measured until then is kept.
    """
    outcome = DeviceOutcome()
    outcome.notes += devices.notes_on_name(devices.device_name(device), device_type=device.type, cluster=None)
    if busy := recorder.sidecar.get("busy"):
        outcome.notes.append(busy_note(busy))
    start_s = time.perf_counter()
    parts = _Bench(request=request, device=device, recorder=recorder, outcome=outcome).parts()
    devices.disable_malloc_trim(device)  # as training does
    try:
        for i, part in enumerate(parts):
            before_s = time.perf_counter()
            left_s = request.budget_s - (before_s - start_s)
            budget_s = left_s * part.share / sum(p.share for p in parts[i:])
            part.measure(budget_s=max(0.0, budget_s))
            advance(time.perf_counter() - before_s)
    finally:
        outcome.seconds = time.perf_counter() - start_s
        recorder.save(ended=now())
    return outcome


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One part of the measurement, and its share of the time."""

    share: float
    measure: Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The measurement of one device."""

    request: DeviceBenchRequest
    device: torch.device
    recorder: DeviceRecorder
    outcome: DeviceOutcome

    def parts(self) -> list[_Part]:
        """Families of this process, and windows of other processes spread between them."""
        request = self.request
        on_host = self.device.type == "cpu"
        before = frozenset(self.recorder.done)  # by the session that this one resumes
        kernels = [
            _Part(share=share, measure=partial(self.family, family))
            for family, share in sorted(SHARES.items(), key=lambda item: item[1])  # short ones first
            if family in request.families and family is not PointFamily.TRAINING
        ]
        started: list[list[_Part]] = []  # in processes of their own
        if PointFamily.TRAINING in request.families:
            part = partial(self.together, 1, known_points=lambda: before)
            started.append(_windows(part, count=WINDOWS if on_host else 1, share=SHARES[PointFamily.TRAINING]))
        several = [n for n in request.num_processes if n > 1]
        if any(family in request.families for family in TOGETHER):
            for n in several:  # more of them take longer to start, and for each step
                share = TOGETHER_SHARE * math.sqrt(n) / sum(map(math.sqrt, several))
                part = partial(self.together, n, known_points=lambda: frozenset(self.recorder.done))
                started.append(_windows(part, count=WINDOWS_TOGETHER if on_host else 1, share=share))
            if not several and PointFamily.COLLECTIVES in request.families:
                self.outcome.notes.append("collectives: one process has no other to communicate with")
        return _spread(kernels, *started)

    def family(self, family: PointFamily, *, budget_s: float) -> None:
        """Measure the points of a family one after the other."""
        device, recorder, outcome = self.device, self.recorder, self.outcome
        if family is PointFamily.TRANSFER and device.type == "cpu":
            outcome.notes.append("transfer: the CPU is its own host")
            return
        points = points_of(family, device_type=device.type, formats=self.formats(), workload=self.request.workload)
        if device.type == "cpu" and family in THREADED:
            points = (replace(p, threads=count) for p in points for count in (0, *self.request.threads))
        left = (p for p in points if p not in recorder.done)
        until_s, point_s = time.perf_counter() + budget_s, min(LONGEST_POINT_S, budget_s / POINTS_A_FAMILY)
        most_bytes = MEMORY_SHARE * devices.memory_bytes(device)
        largest, s_per_work, num_skipped = 0.0, 0.0, 0
        for i, point in enumerate(left):
            left_s, work = max(0.0, until_s - time.perf_counter()), max(1.0, point.flops + point.bytes)
            if not left_s and i > 0:  # every family has a point, even on a busy machine
                break
            if footprint_bytes(point) > most_bytes or CAUTION * work * s_per_work > left_s:
                num_skipped += 1
                continue
            row = _measured(point, device, budget_s=point_s)
            recorder.append(row)
            outcome.count(family, row.status)
            if row.status is PointStatus.FAILED and not _answers(device):
                hint = f"{len(recorder.done)} measurements are in {recorder.path}; continue with --resume"
                raise DeviceLostError(f"the device was lost: {row.reason}", hint=hint)
            if row.status is not PointStatus.FAILED and work >= largest:
                largest, s_per_work = work, row.seconds_median / work
        if num_skipped:
            outcome.notes.append(f"{family}: {num_skipped} points are too large for the memory or the time left")

    def formats(self) -> list[str]:
        """Formats of the workload, else all that the device supports."""
        wanted = self.request.workload.formats if self.request.workload is not None else None
        return [name for name in formats_of(self.device) if wanted is None or name in wanted]

    def together(self, num_processes: int, *, known_points: Callable[[], frozenset[Point]], budget_s: float) -> None:
        """Measure collectives and training steps of `num_processes` processes, which are started for it.

        A process that has measured kernels with several numbers of threads trains up to two fifths slower on a CPU
        than a new one.
        """
        known, device_type = known_points(), self.device.type

        def left(family: PointFamily) -> tuple[Point, ...]:
            if family not in self.request.families:
                return ()
            points = points_of(family, device_type=device_type, formats=self.formats(), num_processes=num_processes)
            return tuple(point for point in points if point not in known)

        work = PointsTogether(
            collectives=left(PointFamily.COLLECTIVES) if num_processes > 1 else (),
            trainings=left(PointFamily.TRAINING),
            recorder=self.recorder,
            device_type=device_type,
            until_s=time.time() + budget_s,
            point_s={
                PointFamily.COLLECTIVES: min(LONGEST_POINT_S, COLLECTIVES_SHARE * budget_s / POINTS_A_FAMILY),
                PointFamily.TRAINING: min(LONGEST_POINT_S, budget_s / TRAININGS),
            },
        )
        if not (work.collectives or work.trainings):
            return
        try:
            run_ranks(measure_together, work, num_ranks=num_processes, device_type=device_type, in_new_process=True)
        except WorkerLostError as error:
            if error.stopped_by is not None:
                raise error.stopped_by from None
            self.outcome.notes.append(f"{num_processes} processes: {error.message}")
        finally:
            for row in self.recorder.added_by_others():
                self.outcome.count(row.point.family, row.status)


def _windows(measure: Callable[..., None], *, count: int, share: float) -> list[_Part]:
    return [_Part(share=share / count, measure=measure)] * count


def _spread(*rows: list[_Part]) -> list[_Part]:
    """Return all parts in one order, the parts of each row spread evenly."""
    placed = [((i + 0.5) / len(row), part) for row in rows for i, part in enumerate(row)]
    return [part for _, part in sorted(placed, key=lambda pair: pair[0])]


def _measured(point: Point, device: torch.device, *, budget_s: float) -> DeviceRow:
    try:
        with _threads(point.threads):
            task = task_of(point, device)
            found = measure(
                task.run, before=task.before, synchronize=lambda: devices.synchronize(device), budget_s=budget_s
            )
    except AbsurdClockError as error:
        return failed(point, error.message)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for nearly all
        return failed(point, str(error).partition("\n")[0] or type(error).__name__)
    sensors = read_sensors(device)
    return row_of(point, found, clock_hz=sensors.clock_hz, temperature_c=sensors.temperature_c)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run with `count` CPU threads, or with all if it is 0."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _answers(device: torch.device) -> bool:
    """Return True if the device still computes 1 + 1."""
    try:
        one = torch.ones(1, device=device)
        return bool((one + one).item() == 2)
    except RuntimeError:
        return False


CPU_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")  # kHz
CPU_TEMPERATURE = Path("/sys/class/thermal/thermal_zone0/temp")  # thousandths of a degree
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """Readings; None where nothing is reported."""

    clock_hz: float | None = None
    temperature_c: float | None = None


def read_sensors(device: torch.device) -> Sensors:
    """Read the sensors of `device`."""
    if device.type == "cuda":
        try:
            with warnings.catch_warnings(action="ignore"):
                return Sensors(
                    clock_hz=torch.cuda.clock_rate(device) * 1e6, temperature_c=float(torch.cuda.temperature(device))
                )
        except (ImportError, RuntimeError, OSError):  # the vendor's management library is absent
            return Sensors()
    khz, milli = _number(CPU_CLOCK), _number(CPU_TEMPERATURE)
    return Sensors(
        clock_hz=_cpuinfo_hz() if khz is None else khz * 1e3, temperature_c=None if milli is None else milli / 1e3
    )


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _cpuinfo_hz() -> float | None:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2] for line in lines if line.startswith("cpu MHz"))
    return next((float(mhz) * 1e6 for mhz in found), None)
