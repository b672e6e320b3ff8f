"""Rates that a device should reach in a quick measurement, from the catalogue and its calibration.

GEMM        n x n x n in bf16: the cost model's time at the calibrated share of the peak
copy        bytes read and written: the memory rate times the calibrated share that streaming reaches
all-reduce  the cost model's time on the fabric of the device's usual node
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

GEMM_SIZE = 8192
COPY_BYTES = 2**30
ALL_REDUCE_BYTES = 2**28

COPY_RATIO = 0.85
"""Share of the memory's bandwidth that a copy reaches, read and written: 85 to 92 % on A100 and H100."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Rates of one device, and of all devices of a node together."""

    gemm_flops_per_s: float
    copy_bytes_per_s: float
    all_reduce_bytes_per_s: float | None  # size of the buffer over the time; None for one device


@cache
def expected_of(accelerator: str, *, num_devices: int) -> Expected:
    """Return the expected rates of `num_devices` of this accelerator in one node.

    >>> expected_of("h200", num_devices=8).copy_bytes_per_s < 4.8e12  # the peak of its memory
    True
    """
    from meshwright.catalog.lookup import cluster
    from meshwright.catalog.stacks import stack_for_engine
    from meshwright.cost.collectives import all_reduce_s, group
    from meshwright.cost.compute import gemm_s
    from meshwright.cost.rates import system_rates
    from meshwright.specs.precision import PRECISIONS

    node = cluster(f"{accelerator}-{num_devices}x1")
    rates = system_rates(node, PRECISIONS["bf16"], stack_for_engine("native"))
    device, n = rates.device, GEMM_SIZE
    gemm_seconds = gemm_s(
        n, n, n,
        flops_per_s=device.bf16_flops_per_s * device.bf16_gemm_ratio,
        bytes_per_s=device.streaming_bytes_per_s,
        num_units=device.num_units, kernel_s=device.kernel_s, output_tiles=device.output_tiles,
    )  # fmt: skip
    all_reduce = None
    if num_devices > 1:
        members = group(size=num_devices, stride=1, net=rates.network)
        all_reduce = ALL_REDUCE_BYTES / float(all_reduce_s(ALL_REDUCE_BYTES, members))
    return Expected(
        gemm_flops_per_s=2.0 * n**3 / float(gemm_seconds),
        copy_bytes_per_s=float(device.memory_bytes_per_s * COPY_RATIO),
        all_reduce_bytes_per_s=all_reduce,
    )
