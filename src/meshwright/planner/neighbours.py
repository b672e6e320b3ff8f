"""Neighbouring requests: batch sizes and numbers of devices near the ones asked for, and how good their best plan is.

A batch or a cluster whose size has few divisors leaves few plans: 1,000 devices and 1,024 sequences leave none, and 7
devices leave a pipeline of seven. Each neighbour is searched as the request itself is. Devices beyond a neighbour's
number stay idle and count all the same: rates are of the whole run, in tokens over what the objective counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

from meshwright.planner.objective import Goal
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import RankedPlan, search
from meshwright.planner.space import divisors
from meshwright.specs.plan import Plan

REACH = 0.25
"""Neighbours change the batch or the number of nodes by at most this share of it."""

LEAST_GAIN = 1.02
"""A neighbour is worth naming from this ratio of rates on."""

MAX_SEARCHES = 4
"""Searches for each of the two, most divisible neighbours first."""


FEW_DIVISORS = 1 / 3
"""Common divisors are few if the greatest is at most this share of the smaller of batch and devices."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A request near another one, and its best plan. `tokens_per_s` is the rate of the whole run."""

    global_batch: int  # sequences
    num_nodes: int
    devices_per_node: int
    num_idle: int  # devices of the request that it does not use
    plan: Plan
    tokens_per_s: float
    gain: float | None  # ratio of rates, by the objective, to the request's best plan; None: that has none
    unit: str = "tokens/s"  # of these rates

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def speed(self) -> str:
        """The gain over the request's best plan; where that has none, the rate of the whole run."""
        return f"{self.tokens_per_s:,.0f} tokens/s" if self.gain is None else f"{self.gain - 1:+.0%} {self.unit}"

    def __str__(self) -> str:
        if not self.num_idle:
            return f"a global batch of {self.global_batch:,} sequences: {self.speed} ({self.plan.describe()})"
        return (
            f"{self.num_devices:,} devices ({self.num_nodes:,} x {self.devices_per_node}), {self.num_idle:,} idle: "
            f"{self.speed} ({self.plan.describe()})"
        )


def shares_few_divisors(request: PlanRequest) -> bool:
    """True if batch and devices have so few divisors in common that a neighbour is likely to be faster."""
    batch, devices = request.batch_of_part, request.num_devices
    return gcd(batch, devices) <= FEW_DIVISORS * min(batch, devices)


def neighbours(request: PlanRequest, *, best: RankedPlan | None, goal: Goal | None = None) -> tuple[Neighbour, ...]:
    """The best neighbour by batch size and the best by number of devices, if `goal` has them better than `best`.

    `best` is the first plan of the request itself; None: it has no plan, and any neighbour with one is named. `goal`
    defaults to throughput.
    """
    goal = goal or Goal(num_devices=request.num_devices)
    value = None if best is None else best.value / request.global_batch
    found = []
    for near in (_other_batches(request), _fewer_devices(request)):
        tried = [n for n in (_neighbour(request, r, goal, value) for r in near) if n is not None]
        if tried:
            least, neighbour = min(tried, key=lambda pair: pair[0])
            if value is None or value / least >= LEAST_GAIN:
                found.append(neighbour)
    return tuple(found)


def _neighbour(
    request: PlanRequest, near: PlanRequest, goal: Goal, value: float | None
) -> tuple[float, Neighbour] | None:
    """The best plan of `near`, and its value for a sequence; `value` is that of the request's best plan."""
    num_idle = request.num_devices - near.num_devices
    best = search(near, top=1, goal=goal.leaving_idle(num_idle), wants_least=False).best
    if best is None:
        return None
    least = best.value / near.global_batch
    return least, Neighbour(
        global_batch=near.global_batch,
        num_nodes=near.cluster.num_nodes,
        devices_per_node=near.cluster.devices_per_node,
        num_idle=num_idle,
        plan=best.plan,
        tokens_per_s=near.global_batch * near.seq_len / best.step_s,
        gain=None if value is None else value / least,
        unit=goal.rate_unit,
    )


def _other_batches(request: PlanRequest) -> list[PlanRequest]:
    """The nearest multiples of the number of devices and of its divisors, largest divisor first."""
    if request.part_batch is not None:
        return []  # the size of a step follows from its labels
    batch = request.global_batch
    sizes = []
    for part in reversed(divisors(request.num_devices)):
        below = batch // part * part
        sizes += [size for size in (below, below + part) if 0 < abs(size - batch) <= REACH * batch]
    return [replace(request, global_batch=size) for size in _first(size for size in sizes if size)]


def _fewer_devices(request: PlanRequest) -> list[PlanRequest]:
    """Clusters of fewer nodes, or of fewer devices of a single node, that share most with the batch."""
    cluster = request.cluster
    if cluster.parts:
        return []  # which part would lose nodes is not asked
    if cluster.num_nodes == 1:
        near = [replace(cluster, devices_per_node=n) for n in range(1, cluster.devices_per_node)]
        near = [c for c in near if 2 * c.num_devices >= cluster.num_devices]
    else:
        fewest = max(1, int((1 - REACH) * cluster.num_nodes))
        near = [replace(cluster, num_nodes=n) for n in range(fewest, cluster.num_nodes)]
    common = {c.num_devices: gcd(c.num_devices, request.batch_of_part) for c in near}
    kept = _first(sorted(common, key=lambda n: (-common[n], -n)))
    return [replace(request, cluster=c) for c in near if c.num_devices in kept]


def _first(sizes: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(sizes))[:MAX_SEARCHES]
