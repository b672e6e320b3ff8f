"""Records of `bench device`: one line per measurement in `records.csv`, with the sidecar `records.json`.

Lines are appended as they are measured, so an interruption costs one point. When the file is opened again, an
incomplete last line is removed, and failed points are measured again. Reading is strict: files of another schema and
impossible values are refused with file and line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import naming, write_atomically
from meshwright.records.fields import read_rows
from meshwright.records.files import Cells, csv_line, differing, read_lines, read_sidecar, sidecar_text
from meshwright.records.measurement import Measurement
from meshwright.records.points import KERNELS, POINT_FIELDS, Point, PointFamily

SCHEMA = "meshwright bench records 2"
MADE_BY = "meshwright bench device"
CSV_NAME, SIDECAR_NAME = "records.csv", "records.json"
TIMES = ("seconds_median", "seconds_low", "seconds_high", "seconds_q1", "seconds_q3")
COLUMNS = (
    *POINT_FIELDS, *TIMES, "samples", "calls", "flops", "bytes",
    "outliers", "clock_hz", "temperature_c", "status", "reason",
)  # fmt: skip
SIDECAR_KEYS = ("schema", "device", "driver", "software", "command", "started", "ended", "git_commit", "budget_s")
SAME_DEVICE = ("device", "driver", "software")
"""Keys of the sidecar that must not change between measurements of one file."""


RENAMED_KERNELS = {"alone": "isolated", "beside": "concurrent"}
"""Kernels of `training` as older files name them."""

FEWEST_SAMPLES = 6  # for an interval of 95 %
Z95 = 1.96  # normal quantile of a 95 % interval
FEW_SD = 0.25
"""Standard deviation of the logarithm of a median of fewer samples. An assumption: their own range is too narrow."""


class PointStatus(StrEnum):
    """End of a measurement."""

    OK = "ok"  # the interval of the median is as narrow as demanded
    WIDE = "wide"  # the time was over before that
    FAILED = "failed"  # not measured; `reason` gives the cause


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One line of the file. Seconds are of one call; a failed measurement has 0."""

    point: Point
    seconds_median: float = 0.0
    seconds_low: float = 0.0  # 95 % interval of the median
    seconds_high: float = 0.0
    seconds_q1: float = 0.0
    seconds_q3: float = 0.0
    samples: int = 0
    calls: int = 0  # in each sample
    outliers: str = ""  # `sample:seconds`, separated by spaces
    clock_hz: float | None = None
    temperature_c: float | None = None
    status: PointStatus
    reason: str = ""

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm of the median."""
        of_interval = math.log(self.seconds_high / self.seconds_low) / (2 * Z95)
        return of_interval if self.samples >= FEWEST_SAMPLES else max(of_interval, FEW_SD)


@dataclass(frozen=True, kw_only=True)
class Records:
    """Content of one file, with failed measurements."""

    path: Path
    sidecar: Mapping[str, Any]
    rows: tuple[DeviceRow, ...]

    @property
    def measured(self) -> list[DeviceRow]:
        return [row for row in self.rows if row.status is not PointStatus.FAILED]


def row_of(
    point: Point, found: Measurement, *, clock_hz: float | None = None, temperature_c: float | None = None
) -> DeviceRow:
    """Line of a completed measurement."""
    (low, high), (q1, q3) = found.interval, found.quartiles
    return DeviceRow(
        point=point,
        seconds_median=found.median,
        seconds_low=low,
        seconds_high=high,
        seconds_q1=q1,
        seconds_q3=q3,
        samples=found.n,
        calls=found.calls,
        outliers=" ".join(f"{o.sample}:{o.seconds:.6g}" for o in found.outliers),
        clock_hz=clock_hz,
        temperature_c=temperature_c,
        status=PointStatus.OK if found.is_narrow else PointStatus.WIDE,
    )


def failed(point: Point, reason: str) -> DeviceRow:
    """Line of a failed measurement."""
    return DeviceRow(point=point, status=PointStatus.FAILED, reason=" ".join(reason.split()))


def in_windows(rows: Iterable[DeviceRow]) -> list[DeviceRow]:
    """Merge the windows of each point into one row: the median of their medians, with their range as interval."""
    by_point: dict[Point, list[DeviceRow]] = {}
    for row in rows:
        by_point.setdefault(row.point, []).append(row)
    return [_over_windows(same) if len(same) > 1 else same[0] for same in by_point.values()]


def _over_windows(rows: list[DeviceRow]) -> DeviceRow:
    medians = [row.seconds_median for row in rows]
    return replace(
        rows[0],
        seconds_median=statistics.median(medians),
        seconds_low=min(medians),
        seconds_high=max(medians),
        samples=sum(row.samples for row in rows),
    )


class DeviceRecorder:
    """Writer of the two files in `folder`. Raises InputError if it holds records of something else."""

    def __init__(self, folder: Path, *, sidecar: Mapping[str, Any], resume: bool) -> None:
        self.path = folder / CSV_NAME
        self.sidecar = {"schema": SCHEMA, **sidecar}
        self.done: set[Point] = set()
        folder.mkdir(parents=True, exist_ok=True)
        kept: list[DeviceRow] = []
        if self.path.exists():
            if not resume:
                raise InputError("there are records already", got=str(self.path), hint="add to them with --resume")
            kept = self._kept()
        write_atomically(self.path, _text(kept))
        write_atomically(folder / SIDECAR_NAME, sidecar_text(self.sidecar))

    def append(self, row: DeviceRow) -> None:
        """Add one line; it is in the file when this returns."""
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as stream:
            stream.write(_line(row))
        if row.status is not PointStatus.FAILED:
            self.done.add(row.point)

    def added_by_others(self) -> list[DeviceRow]:
        """Rows that another process has appended since the last call or `append`."""
        new = [row for row in read(self.path, whole=False).rows if row.point not in self.done]
        self.done |= {row.point for row in new}
        return new

    def close(self, *, ended: str) -> None:
        """Write the end time into the sidecar."""
        self.sidecar = {**self.sidecar, "ended": ended}
        write_atomically(self.path.with_name(SIDECAR_NAME), sidecar_text(self.sidecar))

    def _kept(self) -> list[DeviceRow]:
        before = read(self.path, whole=False)
        for key in SAME_DEVICE:
            if before.sidecar.get(key) != self.sidecar.get(key):
                raise InputError(
                    f"{self.path}: these records are of another {key}",
                    got=differing(before.sidecar.get(key), self.sidecar.get(key)),
                    hint="write to another folder with --out",
                )
        self.sidecar["started"] = before.sidecar["started"]
        self.done = {row.point for row in before.measured}
        return before.measured


# --- reading ---


def read(path: Path, *, whole: bool = True) -> Records:
    """Read the records at `path`, the CSV file or its folder. With `whole` false an incomplete last line is ignored.

    Raises InputError with file and line for a file of another schema.
    """
    path = path / CSV_NAME if path.is_dir() else path
    lines = read_lines(path, columns=COLUMNS, what="bench records", made_by=MADE_BY, whole=whole)
    sidecar = read_sidecar(path.with_suffix(".json"), schema=SCHEMA, keys=SIDECAR_KEYS, made_by=MADE_BY)
    return Records(path=path, sidecar=sidecar, rows=read_rows(lines, _row))


def _row(line: Cells) -> DeviceRow:
    where = line.where
    status = line.one_of("status", PointStatus)
    family = line.one_of("family", PointFamily)
    kernel = RENAMED_KERNELS.get(line.cells["kernel"], line.cells["kernel"])
    if kernel not in KERNELS[family]:
        raise InputError(f"{where}: kernel", got=kernel, allowed=", ".join(KERNELS[family]))
    numbers = {name: line.whole(name) for name in POINT_FIELDS if name not in ("family", "kernel", "format")}
    point = Point(family=family, kernel=kernel, format=line.cells["format"], **numbers)
    is_failed = status is PointStatus.FAILED
    times = {name: line.number(name, least=0.0, may_be_least=is_failed) or 0.0 for name in TIMES}
    if not (times["seconds_low"] <= times["seconds_median"] <= times["seconds_high"]):
        raise InputError(f"{where}: seconds_median is not between seconds_low and seconds_high")
    return DeviceRow(
        point=point,
        **times,
        samples=line.whole("samples"),
        calls=line.whole("calls"),
        outliers=line.cells["outliers"],
        clock_hz=line.number("clock_hz"),
        temperature_c=line.number("temperature_c"),
        status=status,
        reason=line.cells["reason"],
    )


# --- writing ---


def _line(row: DeviceRow) -> str:
    point = {name: getattr(row.point, name) or "" for name in POINT_FIELDS}
    measured = {
        **{name: f"{getattr(row, name):.9g}" for name in TIMES},
        "samples": row.samples,
        "calls": row.calls,
        "outliers": row.outliers,
        "clock_hz": "" if row.clock_hz is None else f"{row.clock_hz:.6g}",
        "temperature_c": "" if row.temperature_c is None else f"{row.temperature_c:g}",
    }
    if row.status is PointStatus.FAILED:
        measured = dict.fromkeys(measured, "")
    cells = {
        **point, **measured, "flops": f"{row.point.flops:.9g}", "bytes": f"{row.point.bytes:.9g}",
        "status": row.status.value, "reason": row.reason,
    }  # fmt: skip
    return csv_line([str(cells[name]) for name in COLUMNS])


def _text(rows: Iterable[DeviceRow]) -> str:
    return csv_line(COLUMNS) + "".join(_line(row) for row in rows)
