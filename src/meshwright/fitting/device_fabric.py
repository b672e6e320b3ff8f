"""The fabric inside a measured machine, and its measured collectives.

The fit chooses latency and rate of the fabric so that the modelled all-reduce of the smallest and of the
largest message takes the measured seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.calibration.communication import Curve, MeasuredCollectives
from meshwright.calibration.parameters import MeasuredParameter
from meshwright.cost.collectives import all_reduce_s, constants_for, network_row
from meshwright.cost.groups import groups_of
from meshwright.cost.tables import plan_row
from meshwright.fitting.device_rates import bisect
from meshwright.fitting.errors import clipped_sd
from meshwright.records.device import DeviceRow
from meshwright.specs.hardware import Accelerator, Fabric
from meshwright.specs.plan import Plan

LATENCY_RANGE_S = (1e-9, 1.0)
RATE_RATIO_RANGE = (1e-4, 1e4)
"""Ranges in which latency and rate are searched."""


def fit_fabric(
    accelerator: Accelerator, device: Mapping[str, Any], rows: Sequence[DeviceRow]
) -> tuple[Fabric, dict[str, MeasuredParameter]]:
    """The fabric of the machine in the sidecar `device`, and the parameters that the measured `rows` give."""
    through_memory = accelerator.memory_bytes_per_s / 2  # one copy in, one out
    rate = accelerator.scale_up_bytes_per_s or through_memory
    fabric = Fabric(
        name=f"inside {device['name']}",
        scale_up_domain=max(2, device["count"]),
        scale_up_bytes_per_s=rate,
        scale_up_peer_bytes_per_s=accelerator.scale_up_peer_bytes_per_s or rate,
        scale_up_latency_s=0.0,
        scale_out_bytes_per_s=rate,
        scale_out_latency_s=0.0,
    )
    reduces = sorted((r for r in rows if r.point.kernel == "all_reduce"), key=lambda r: r.point.size_bytes)
    if not reduces:
        return fabric, {}
    small, large = reduces[0], reduces[-1]
    latency_s = bisect(
        lambda s: modelled_all_reduce_s(fabric, small, latency_s=s) < small.seconds_median, *LATENCY_RANGE_S
    )
    fabric = replace(fabric, scale_up_latency_s=latency_s, scale_out_latency_s=latency_s)
    ratio = bisect(lambda r: modelled_all_reduce_s(fabric, large, ratio=r) > large.seconds_median, *RATE_RATIO_RANGE)
    fabric = replace(
        fabric,
        scale_up_bytes_per_s=rate * ratio,
        scale_up_peer_bytes_per_s=fabric.scale_up_peer_bytes_per_s * ratio,
        scale_out_bytes_per_s=rate * ratio,
    )
    return fabric, {"scale_up_ratio": MeasuredParameter(value=1.0, sd=clipped_sd(large.log_sd))}


def modelled_all_reduce_s(
    fabric: Fabric, row: DeviceRow, *, latency_s: float | None = None, ratio: float = 1.0
) -> float:
    """Seconds of the row's all-reduce on `fabric` with another latency, and its rates times `ratio`."""
    tried = replace(
        fabric,
        scale_up_latency_s=fabric.scale_up_latency_s if latency_s is None else latency_s,
        scale_up_bytes_per_s=fabric.scale_up_bytes_per_s * ratio,
        scale_up_peer_bytes_per_s=fabric.scale_up_peer_bytes_per_s * ratio,
    )
    network = network_row(tried, constants_for(tried))
    group = groups_of(plan_row(Plan(data_shard=row.point.num_processes)), network).whole
    return float(all_reduce_s(float(row.point.size_bytes), group))


def measured_collectives(rows: Sequence[DeviceRow]) -> MeasuredCollectives:
    """Seconds of each collective by processes and size of the message."""
    by_kernel: dict[str, dict[int, list[DeviceRow]]] = {}
    for row in sorted(rows, key=lambda r: (r.point.kernel, r.point.num_processes)):
        by_kernel.setdefault(row.point.kernel, {}).setdefault(row.point.num_processes, []).append(row)
    return MeasuredCollectives(
        curves={
            kernel: {count: curve_of(own) for count, own in by_count.items()} for kernel, by_count in by_kernel.items()
        }
    )


def curve_of(rows: Iterable[DeviceRow]) -> Curve:
    """Seconds of one collective between one number of processes, by size."""
    rows = sorted(rows, key=lambda r: r.point.size_bytes)
    return Curve(
        size_bytes=tuple(float(r.point.size_bytes) for r in rows), seconds=tuple(r.seconds_median for r in rows)
    )
