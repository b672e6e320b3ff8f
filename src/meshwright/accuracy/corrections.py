"""Efficiency corrections for tables of published runs: each row uses its own accelerator's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.cost.compute import KernelCorrections

CorrectionsByKernel = Mapping[str, EfficiencyCorrection]
"""Efficiency corrections by kernel and format, such as "gemm/forward/bf16"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCorrections(KernelCorrections):
    """`KernelCorrections` for n rows with different accelerators. The factor is 1 where there is no correction."""

    by_device: Mapping[str, CorrectionsByKernel]
    devices: NDArray[Any]  # n names
    formats: NDArray[Any]  # n names
    known: dict[tuple[Any, ...], NDArray[np.float64]] = field(default_factory=dict)
    """Cache of factors by shape. A fit reads the same shapes many times, because no parameter changes them."""

    def factor(self, kernel: str, *shape: Array, bf16: bool = False) -> Array:
        """n factors."""
        sizes = [np.broadcast_to(np.asarray(s, dtype=float), self.devices.shape) for s in shape]
        key = (kernel, bf16, *(s.tobytes() for s in sizes))
        if key not in self.known:
            found = np.ones(len(self.devices))
            for device, corrections in self.by_device.items():
                for number_format in np.unique(self.formats):
                    correction = corrections.get(f"{kernel}/{'bf16' if bf16 else number_format}")
                    rows = (self.devices == device) & (self.formats == number_format)
                    if correction is not None and rows.any():
                        found[rows] = correction.factor(*(s[rows] for s in sizes))
            self.known[key] = found
        return self.known[key]

    def take(self, index: NDArray[np.intp]) -> RowCorrections:
        """The rows at `index`."""
        return RowCorrections(by_device=self.by_device, devices=self.devices[index], formats=self.formats[index])
