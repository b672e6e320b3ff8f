"""Memory budget: the part of a device's memory that a plan may reserve.

    usable = ratio x capacity        a plan fits when its reserved memory is at most `usable`

The search, `estimate`, `explain`, `scale`, `export` and the planning of a training ask this budget with the same
ratio, so that a plan that one of them returns fits in all the others. Only a comparison with runs that are known to
have worked or failed (`meshwright.accuracy`) has no reserve: there a reserve would count as an error of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

PLANNING_RATIO = 0.95
"""Share of a device's memory that a plan may reserve. An assumption: what drivers and other processes take differs by
host, and a plan that is chosen to the last byte fails on the first host that has less."""

WHOLE_DEVICE_RATIO = 1.0
"""No reserve: for runs whose outcome is known."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Memory of a device and the share of it that a plan may reserve.

    Raises InputError for a ratio that is not above 0 and at most 1.
    """

    capacity_bytes: Any  # a number, or an array with one per row of a table
    ratio: float = PLANNING_RATIO

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise InputError("share of usable memory is out of range", got=self.ratio, allowed="above 0, up to 1")

    @property
    def usable_bytes(self) -> Any:
        """Memory that a plan may reserve, in bytes per device."""
        return self.capacity_bytes * self.ratio

    def fits(self, reserved_bytes: Any) -> Any:
        """True where `reserved_bytes`, a number or an array, is at most `usable_bytes`.

        >>> budget = MemoryBudget(capacity_bytes=100.0)
        >>> [budget.fits(size) for size in (95.0, 96.0)]
        [True, False]
        """
        return reserved_bytes <= self.usable_bytes
