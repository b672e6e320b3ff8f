"""Measured seconds of collectives by kind, number of processes and message size.

Between two sizes the logarithm of the seconds is linear in the logarithm of the size. Smaller sizes take the
seconds of the smallest; above the largest the seconds are proportional to the bytes. The interpolation
between two numbers of processes is the same. A group smaller than any measured one takes the seconds of the
smallest; a larger group uses the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any
"""A number or a NumPy array of numbers."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of one collective between one number of processes. Sizes are in rising order."""

    size_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def log_s(self, log_bytes: Array) -> Array:
        """Logarithm of the seconds at logarithms of sizes."""
        x, y = np.log(self.size_bytes), np.log(self.seconds)
        return np.interp(log_bytes, x, y) + np.maximum(log_bytes - x[-1], 0.0)


@dataclass(frozen=True, kw_only=True)
class MeasuredCollectives:
    """Measured collectives of one machine; empty where nothing was measured.

    processes_per_host: processes on the machine's CPU. Several groups communicate at the same time through the same
    memory, so each takes as many times longer as there are groups.
    """

    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)  # "all_gather" -> processes -> curve
    processes_per_host: int = 1

    def seconds(self, kernel: str, size_bytes: Array, num_processes: Array, formula_s: Array) -> Array:
        """Seconds of one collective on a buffer of `size_bytes`; `formula_s` where it was not measured."""
        known = self.curves.get(kernel)
        if not known:
            return formula_s
        counts = sorted(known)
        n, size = np.broadcast_arrays(np.asarray(num_processes, dtype=float), np.asarray(size_bytes, dtype=float))
        log_s = np.stack([known[count].log_s(np.log(np.maximum(size, 1.0))) for count in counts])
        measured_s = np.exp(_between(np.log(np.clip(n, counts[0], counts[-1])), np.log(counts), log_s))
        at_once = np.maximum(self.processes_per_host / np.maximum(n, 1), 1.0)
        found = np.where(n > counts[-1], formula_s, measured_s * at_once)
        return np.where((n > 1) & (size > 0), found, 0.0)


def _between(x: Array, knots: Array, values: Array) -> Array:
    """Interpolate linearly in `x` between rows of `values` at the rising `knots`."""
    found = np.broadcast_to(values[0], np.broadcast(x, values[0]).shape)
    for i in range(1, len(knots)):
        share = np.clip((x - knots[i - 1]) / (knots[i] - knots[i - 1]), 0.0, 1.0)
        found = found + share * (values[i] - values[i - 1])
    return found


def to_document(collectives: MeasuredCollectives) -> dict[str, Any]:
    """JSON document: pairs of bytes and seconds."""
    return {
        kernel: {
            str(count): [[b, float(f"{s:.4g}")] for b, s in zip(curve.size_bytes, curve.seconds, strict=True)]
            for count, curve in by_count.items()
        }
        for kernel, by_count in collectives.curves.items()
    }


def from_document(document: Mapping[str, Any]) -> MeasuredCollectives:
    """Read a document of `to_document`. Raises KeyError, TypeError or ValueError for any other."""
    return MeasuredCollectives(
        curves={
            kernel: {int(count): _curve(pairs) for count, pairs in by_count.items()}
            for kernel, by_count in document.items()
        }
    )


def _curve(pairs: Any) -> Curve:
    size_bytes, seconds = (tuple(float(x) for x in column) for column in zip(*pairs, strict=True))
    if not all(x > 0 for x in (*size_bytes, *seconds)) or list(size_bytes) != sorted(set(size_bytes)):
        raise ValueError("sizes of a collective must rise, and its seconds must be above 0")
    return Curve(size_bytes=size_bytes, seconds=seconds)
