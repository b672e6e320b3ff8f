"""Sides of kernels: shapes that `bench device` measured, and routes that `bench kernels` timed.

    CallRates      one kernel on one shape: seconds, FLOP/s, bytes/s and the share of the roofline

FLOP/s and bytes/s are the least work of the call over its time. The roofline of `bench device` is made of the highest
FLOP/s of a format and the highest bytes/s of a copy in the same record; `bench kernels` has a roofline in its
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.answers.comparison.sides import (
    KERNEL_TIME,
    ROOFLINE,
    Evidence,
    Side,
    SideValue,
    Statistic,
    accelerator_named,
    sidecar_facts,
    software_text,
)  # fmt: skip
from meshwright.records import device, kernel_routes
from meshwright.records.points import POINT_FIELDS, Point, PointFamily

KERNEL_FAMILIES = (
    PointFamily.GEMM, PointFamily.ATTENTION, PointFamily.ELEMENTWISE, PointFamily.OPTIMIZER, PointFamily.MEMORY,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallRates:
    """One kernel on one shape. Rates are None where the record does not say the work."""

    call: str
    format: str
    route: str  # empty: the library's
    seconds: float  # forward, and backward where it was timed
    forward_s: float
    backward_s: float | None
    flops_per_s: float | None
    bytes_per_s: float | None
    roofline_ratio: float | None
    peak_bytes: float | None = None
    error: float | None = None
    is_default: bool = False
    is_fastest: bool = True


def device_calls(found: device.Records) -> tuple[CallRates, ...]:
    """The kernels of `bench device`."""
    rows = [r for r in found.measured if r.point.family in KERNEL_FAMILIES and r.seconds_median > 0]
    peaks: dict[str, float] = {}
    for row in rows:
        rate = row.point.flops / row.seconds_median
        peaks[row.point.format] = max(peaks.get(row.point.format, 0.0), rate)
    copies = [r.point.bytes / r.seconds_median for r in rows if r.point.family is PointFamily.MEMORY]
    bandwidth = max(copies, default=0.0)

    def share(point: Point, seconds: float) -> float | None:
        if not bandwidth:
            return None
        peak = peaks.get(point.format, 0.0)
        return max(point.bytes / bandwidth, point.flops / peak if peak else 0.0) / seconds

    return tuple(
        CallRates(
            call=kernel_name(r.point), format=r.point.format, route="", seconds=r.seconds_median,
            forward_s=r.seconds_median, backward_s=None,
            flops_per_s=_rate(r.point.flops, r.seconds_median), bytes_per_s=_rate(r.point.bytes, r.seconds_median),
            roofline_ratio=share(r.point, r.seconds_median),
        )
        for r in rows
    )  # fmt: skip


def _rate(work: float | None, seconds: float) -> float | None:
    return work / seconds if work else None


def route_calls(found: kernel_routes.KernelRoutes) -> tuple[CallRates, ...]:
    """The routes of `bench kernels` that were measured."""
    return tuple(
        CallRates(
            call=r.call, format=r.format, route=r.route, seconds=r.seconds, forward_s=r.forward_s.median,
            backward_s=None if r.backward_s is None else r.backward_s.median,
            flops_per_s=_rate(r.flops, r.seconds), bytes_per_s=_rate(r.least_bytes, r.seconds),
            roofline_ratio=r.roofline_ratio, peak_bytes=r.peak_bytes, error=r.error, is_default=r.is_default,
            is_fastest=r.is_fastest,
        )
        for r in found.rows
        if r.forward_s is not None
    )  # fmt: skip


def kernel_calls(folder: Path, mark: str) -> tuple[CallRates, ...]:
    """The kernels of a record, by the file that marks its folder; none for other kinds."""
    if mark == kernel_routes.NAME:
        return route_calls(kernel_routes.read_kernel_routes(folder))
    if mark == device.CSV_NAME:
        return device_calls(device.read(folder))
    return ()


def _conditions(side: Mapping[str, Any]) -> dict[str, str]:
    return {
        "accelerator": accelerator_named(side["device"]), "software": software_text(side["software"], "torch"),
        "software date": str(side["started"])[:7],
    }  # fmt: skip


def kernel_side(found: device.Records, *, name: str) -> Side:
    """The side of `bench device`: one workload for each kernel and shape."""
    conditions = _conditions(found.sidecar)
    values = tuple(
        SideValue(
            workload=kernel_name(row.point), metric=KERNEL_TIME, value=row.seconds_median, low=row.seconds_low,
            high=row.seconds_high, statistic=Statistic.MEDIAN, evidence=Evidence.MEASURED,
            conditions={**conditions, "precision": row.point.format},
        )
        for row in found.measured
        if row.seconds_median > 0
    )  # fmt: skip
    return Side(name=name, kind="kernels", values=values, facts=sidecar_facts(found.sidecar, found.path))


def routes_side(found: kernel_routes.KernelRoutes, *, name: str) -> Side:
    """The side of `bench kernels`: one workload for each call, with the time of its fastest route."""
    conditions = _conditions(found.document)
    values: list[SideValue] = []
    for row in found.rows:
        if row.forward_s is None or not row.is_fastest:
            continue
        passes = [p for p in (row.forward_s, row.backward_s) if p is not None]
        common: dict[str, Any] = {
            "workload": row.call, "statistic": Statistic.MEDIAN, "evidence": Evidence.MEASURED,
            "conditions": {**conditions, "precision": row.format, "engine": f"route {row.route}"},
        }  # fmt: skip
        low, high = (sum(getattr(p, end) for p in passes) for end in ("low", "high"))
        values.append(SideValue(metric=KERNEL_TIME, value=row.seconds, low=low, high=high, **common))
        if row.roofline_ratio:
            values.append(SideValue(metric=ROOFLINE, value=row.roofline_ratio, **common))
    facts = sidecar_facts(found.document, found.path)
    return Side(name=name, kind="kernel routes", values=tuple(values), facts=facts)


def kernel_name(point: Point) -> str:
    """Kernel and shape as one workload.

    >>> kernel_name(Point(family=PointFamily.GEMM, kernel="forward", format="bf16", m=64, n=128, k=256))
    'gemm forward bf16, m 64, n 128, k 256'
    """
    named = {"family", "kernel", "format"}
    unset = {"num_processes": 1}
    shape = [
        f"{f.replace('_', ' ')} {getattr(point, f)}"
        for f in POINT_FIELDS
        if f not in named and getattr(point, f) != unset.get(f, 0)
    ]
    return ", ".join([" ".join(p for p in (point.family, point.kernel, point.format) if p), *shape])
