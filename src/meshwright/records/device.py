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
from meshwright.records.files import Recorder, RowTable, differing, read_table
from meshwright.records.measurement import Measurement
from meshwright.records.points import KERNELS, POINT_FIELDS, Point

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


def _checked(row: DeviceRow, where: str) -> DeviceRow:
    """The row. Raises InputError for a kernel or times that cannot be."""
    point = row.point
    if point.kernel not in KERNELS[point.family]:
        raise InputError(f"{where}: kernel", got=point.kernel, allowed=", ".join(KERNELS[point.family]))
    absent = [name for name in TIMES if row.status is not PointStatus.FAILED and not getattr(row, name)]
    if absent:
        raise InputError(f"{where}: {absent[0]} is out of range", got=0.0, allowed="above 0")
    if not (row.seconds_low <= row.seconds_median <= row.seconds_high):
        raise InputError(f"{where}: seconds_median is not between seconds_low and seconds_high")
    return row


TABLE = RowTable(
    kind=DeviceRow, name=CSV_NAME, what="bench records", made_by=MADE_BY, empty_zeros=(int, float), columns=COLUMNS,
    derived={"flops": lambda row: row.point.flops, "bytes": lambda row: row.point.bytes}, check=_checked,
)  # fmt: skip


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
        clock_hz=_six_digits(clock_hz),
        temperature_c=_six_digits(temperature_c),
        status=PointStatus.OK if found.is_narrow else PointStatus.WIDE,
    )


def _six_digits(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.6g}")


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


class DeviceRecorder(Recorder):
    """Writer of the two files in `folder`. Raises InputError if it holds records of something else."""

    def __init__(self, folder: Path, *, sidecar: Mapping[str, Any], resume: bool) -> None:
        super().__init__(folder, name=SIDECAR_NAME, sidecar={"schema": SCHEMA, **sidecar})
        self.path = folder / CSV_NAME
        hint = "add to them with --resume"
        kept = self.begin_or_resume(TABLE, resume=resume, kept=self._kept, what="records", hint=hint)
        self.done = {row.point for row in kept}

    def append(self, row: DeviceRow) -> None:
        """Add one line; it is in the file when this returns."""
        TABLE.append(self.path, row)
        if row.status is not PointStatus.FAILED:
            self.done.add(row.point)

    def added_by_others(self) -> list[DeviceRow]:
        """Rows that another process has appended since the last call or `append`."""
        new = [row for row in read(self.path, whole=False).rows if row.point not in self.done]
        self.done |= {row.point for row in new}
        return new

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
        return before.measured


def read(path: Path, *, whole: bool = True) -> Records:
    """Read the records at `path` as `read_table` does."""
    path, sidecar, rows = read_table(path, TABLE, schema=SCHEMA, keys=SIDECAR_KEYS, whole=whole)
    return Records(path=path, sidecar=sidecar, rows=rows)


def busy_note(load: str) -> str:
    """A caution about records of a machine that was busy when their measurement began."""
    return f"this machine was busy: {load}; rates and a calibration of them are those of a busy machine"
