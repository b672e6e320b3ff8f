"""Bytes that a compute unit loads: what streaming kernels of a step reach beside the memory's bandwidth.

    reached = 1 / (1 / B + 1 / (U c))

B memory bandwidth, U compute units, c bytes/s of a unit's port to the L2 cache. Kernels of a step wait for memory and
port one after the other where they keep few loads in flight. A unit of an H100 shares 25 GB/s of its memory, of an H200
36, of a B200 54, so that the same kernels reach less of the bandwidth there.
"""

from __future__ import annotations

from meshwright.specs.hardware import Accelerator

UNIT_PORT_BYTES_PER_S = 64 * 1.85e9
"""64 bytes a cycle at the clock of an H100: an assumption, as is that both times add. The L2 caches of A100 and H100
give all multiprocessors 5,120 bytes a cycle, 47 and 39 each (7,219 GB/s at 1,410 MHz and 8,986 at 1,755: table 3 of
doi 10.1016/j.ultsonch.2023.106546)."""

PORTED = ("NVIDIA", "AMD")
"""Vendors whose devices load through many small units; others have few of them, with memories of their own."""


def unit_pace(accelerator: Accelerator) -> float:
    """Seconds of bytes through the ports of compute units over those at the memory's bandwidth; 0: no such ports.

    >>> from meshwright import catalog
    >>> [round(unit_pace(catalog.accelerator(name)), 2) for name in ("h100", "h200", "b200", "tpu7x")]
    [0.21, 0.31, 0.46, 0.0]
    """
    if accelerator.vendor not in PORTED:
        return 0.0
    return accelerator.memory_bytes_per_s / (accelerator.num_compute_units * UNIT_PORT_BYTES_PER_S)


def unit_bytes_per_s(accelerator: Accelerator) -> float:
    """Bytes/s that streaming kernels give each compute unit, at the whole bandwidth of the memory."""
    own = accelerator.memory_bytes_per_s / accelerator.num_compute_units
    return own / (1 + unit_pace(accelerator))
