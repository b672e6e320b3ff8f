"""The fewest devices that train in time.

The run's own number of devices is doubled, or halved, until it is just in time. Between the last two sizes eighths are
tried, in whole nodes: a size between them is at most an eighth too large, and each must suit the batch to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

from meshwright.errors import InfeasibleError
from meshwright.planner.scaling.curve import scale
from meshwright.planner.scaling.sizes import Study
from meshwright.planner.training import Training
from meshwright.specs.hardware import MAX_DEVICES
from meshwright.units import DAY_S

PARTS = 8
"""Steps between a size and its double."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The fewest devices whose training takes at most `days`: by the estimate, and by the upper end of its interval."""

    days: float
    num_devices: int
    num_devices_at_high_end: int | None  # None: no size that was tried


def least_devices(study: Study, days: float) -> Deadline:
    """The fewest devices that train `study.num_tokens` in `days`. Raises InfeasibleError where no size does."""

    @cache
    def training(size: int) -> Training | None:
        points = scale(study, [size]).points
        return points[0].training if points else None

    def sizes() -> Iterator[int]:
        """The run's size and its doubles, until the devices are more than the batch feeds: then there is no plan."""
        size, has_plan = study.request.num_devices, False
        while size <= MAX_DEVICES and (training(size) or not has_plan):
            has_plan = has_plan or training(size) is not None
            yield size
            size *= 2

    def least(end: Callable[[Training], float]) -> int | None:
        return _least(study, lambda size: (t := training(size)) is not None and end(t) <= days * DAY_S, sizes)

    found = least(lambda t: t.wall.value)
    if found is None:
        done = {size: t.wall.value / DAY_S for size in sizes() if (t := training(size))}
        best = min(done, key=lambda size: done[size], default=None)
        tried = "no size fits" if best is None else f"{best:,} devices take {done[best]:.3g} days"
        raise InfeasibleError(
            f"no number of devices that was tried trains in {days:g} days: {tried}",
            hint="a larger global batch feeds more devices (--gbs), or train on fewer tokens (--tokens)",
        )
    return Deadline(days=days, num_devices=found, num_devices_at_high_end=least(lambda t: t.wall.high))


def _least(study: Study, in_time: Callable[[int], bool], sizes: Callable[[], Iterator[int]]) -> int | None:
    cluster = study.request.cluster
    node = cluster.num_devices // gcd(*(part.num_nodes for part in cluster.parts or (cluster,)))
    size: int | None = cluster.num_devices
    if in_time(size):
        while size // 2 % node == 0 and size > node and in_time(size // 2):
            size //= 2
    else:
        size = next(filter(in_time, sizes()), None)
        if size is None:
            return None
    between = {-(-size * part // (2 * PARTS * node)) * node for part in range(PARTS, 2 * PARTS)}
    return next((s for s in sorted(between) if s < size and in_time(s)), size)
