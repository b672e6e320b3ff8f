"""Goodput: the share of wall time that becomes training progress, with failures, checkpoints and spare nodes.

Symbols, all in seconds: M mean time between failures of the run, tau useful work between two checkpoints,
delta the time that a save blocks training, L the time from a save until it can be restored (asynchronous
write), R the time from a failure until training runs again.

Failures are a Poisson process (Revisiting Reliability in Large-Scale Machine Learning Research Clusters, Meta
2024, finds the 1/n scaling that this implies). Between two failures the number of checkpoints that became
durable is

    E[N] = sum over k of P(no failure for k (tau + delta) + L) = exp(-L/M) / (exp((tau + delta)/M) - 1)

and a cycle of one failure and its recovery, during which failures may strike again, lasts M exp(R/M). By the
renewal-reward theorem

    G = tau E[N] / (M exp(R/M)) = tau / (M exp((R + L)/M) (exp((tau + delta)/M) - 1))

For L = 0 this is the complete model of J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22, 2006. The best tau depends on delta and M
only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.catalog import reliability
from meshwright.catalog.reliability import FailureRange, FailureRate
from meshwright.errors import InputError
from meshwright.specs.estimate import Tier

_NEWTON_STEPS = 5  # quadratic convergence from a near start: 4 reach double precision for any delta/M


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Shares of wall time that are lost; the losses and the goodput sum to one."""

    save_ratio: float  # training blocked by saves
    rework_ratio: float  # work done and lost
    restart_ratio: float  # from failure to training again
    spares_ratio: float  # waiting for a node because no spare was left


@dataclass(frozen=True, kw_only=True)
class GoodputSwing:
    """Goodput with one assumption at the low and the high end of its range."""

    name: str
    at_low: float
    at_high: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Share of wall time that becomes progress, in (0, 1].

    `low` and `high` come from the published range of failure rates at the same checkpoint interval. The tier
    is guessed while the recovery times are assumptions.
    """

    value: float
    low: float
    high: float
    tier: Tier
    mtbf_s: float  # of the run
    interval_s: float  # useful work between two checkpoints
    losses: Losses

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "unit": "ratio",
            "tier": self.tier.name.lower(),
            "mtbf_s": self.mtbf_s,
            "interval_s": self.interval_s,
            "losses": asdict(self.losses),
        }


def mtbf_s(*, device_mtbf_s: Array, num_devices: Array) -> Array:
    """Mean time between failures of a run that stops when any of its devices fails: M = M_device / n."""
    return device_mtbf_s / num_devices


def optimal_interval_s(*, stall_s: Array, mtbf_s: Array) -> Array:
    """The tau that maximises `goodput_ratio`, exactly; delta > 0.

    Setting the derivative to zero gives u + exp(-(u + d)) = 1 with u = tau/M and d = delta/M. The left side
    is convex and the root lies below min(sqrt(2 d), 1), so Newton's method started there descends onto it.
    """
    d = stall_s / mtbf_s
    u = np.minimum(np.sqrt(2 * d), 1.0)
    for _ in range(_NEWTON_STEPS):
        slope = np.expm1(-(u + d))
        u = u + (u + slope) / slope
    return u * mtbf_s


def goodput_ratio(*, interval_s: Array, stall_s: Array, mtbf_s: Array, restart_s: Array, lag_s: Array = 0.0) -> Array:
    """G of the module docstring: exact for exponential failures and constant tau, delta, L and R."""
    with np.errstate(over="ignore"):  # hopeless cases overflow to infinity and become 0
        growth = np.exp((restart_s + lag_s) / mtbf_s) * np.expm1((interval_s + stall_s) / mtbf_s)
        return interval_s / (mtbf_s * growth)


def goodput_of_run(
    *,
    num_devices: int,
    bytes_per_device: float,
    given: Mapping[str, float] | None = None,
    rates: FailureRange | None = None,
    num_spares: int | None = None,
    asynchronous: bool = True,
) -> Goodput:
    """Goodput from the size of the states alone; `catalog.reliability` assumes the terms that `given` lacks.

    Each device writes `bytes_per_device` to a checkpoint.
    """
    size = {"bytes_per_device": bytes_per_device, "num_devices": num_devices, "given": given}
    return estimate_goodput(
        num_devices=num_devices,
        checkpoint=checkpoint_cost(**size, asynchronous=asynchronous),
        restart=restart_cost(**size),
        rates=rates,
        num_spares=num_spares,
        given=given,
    )


def estimate_goodput(
    *,
    num_devices: int,
    checkpoint: CheckpointCost,
    restart: RestartCost,
    rates: FailureRange | None = None,
    interval_s: float | None = None,
    num_spares: int | None = None,
    given: Mapping[str, float] | None = None,
) -> Goodput:
    """Goodput of one run with known costs of a checkpoint and a restart.

    `interval_s` None: the best one for the chosen rate, but not so short that a save begins before the last
    one is written. `num_spares` None: a spare is always there; otherwise `given` may hold `repair_s` and
    `replaced_ratio`. Raises `InputError` for values that make no sense.
    """
    _check(num_devices=num_devices, stall_s=float(checkpoint.stall_s), interval_s=interval_s, num_spares=num_spares)
    rates = rates or reliability.failure_range()
    stall_s, lag_s, restart_s = float(checkpoint.stall_s), float(checkpoint.lag_s), float(restart.total_s)
    mtbf = float(mtbf_s(device_mtbf_s=rates.value.device_mtbf_s, num_devices=num_devices))
    if interval_s is None:
        best = optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf)
        interval_s = max(float(best), lag_s)
    interval = interval_s  # no longer None, also in `shares`

    def shares(rate: FailureRate) -> tuple[float, float]:
        """Goodput and share of waiting for spares."""
        m = float(mtbf_s(device_mtbf_s=rate.device_mtbf_s, num_devices=num_devices))
        waiting = _waiting_ratio(m, num_spares, reliability.assumed(given))
        running = goodput_ratio(interval_s=interval, stall_s=stall_s, lag_s=lag_s, restart_s=restart_s, mtbf_s=m)
        return float(running) * (1 - waiting), waiting

    value, waiting = shares(rates.value)
    return Goodput(
        value=value,
        low=shares(rates.low)[0],
        high=shares(rates.high)[0],
        tier=Tier.GUESSED,
        mtbf_s=mtbf,
        interval_s=interval,
        losses=_losses(
            ratio=value, waiting=waiting, stall_per_work=stall_s / interval, restart_per_mtbf=restart_s / mtbf
        ),
    )


def sensitivity(
    *, num_devices: int, bytes_per_device: float, num_spares: int | None = None
) -> tuple[GoodputSwing, ...]:
    """Goodput at both ends of each assumption's range, one at a time, the largest swing first."""

    def at(name: str, value: float) -> float:
        size = {"num_devices": num_devices, "bytes_per_device": bytes_per_device}
        return goodput_of_run(**size, num_spares=num_spares, given={name: value}).value  # ty: ignore[invalid-argument-type]

    rows = [reliability.assumption(name) for name in reliability.assumption_names()]
    swings = [GoodputSwing(name=a.name, at_low=at(a.name, a.low), at_high=at(a.name, a.high)) for a in rows]
    now = goodput_of_run(num_devices=num_devices, bytes_per_device=bytes_per_device, num_spares=num_spares)
    swings.append(GoodputSwing(name="failure_rate", at_low=now.low, at_high=now.high))
    moved = [swing for swing in swings if swing.at_low != swing.at_high]
    return tuple(sorted(moved, key=lambda swing: -abs(swing.at_high - swing.at_low)))


def wall_s(*, productive_s: Array, goodput_ratio: Array) -> Array:
    """Calendar time of a run whose steps alone take `productive_s`."""
    return productive_s / goodput_ratio


def _losses(*, ratio: float, waiting: float, stall_per_work: float, restart_per_mtbf: float) -> Losses:
    """Shares of one failure cycle M exp(R/M): tau E[N] useful, delta E[N] saving, M (exp(R/M) - 1)
    restarting; what remains of the M seconds of running was lost."""
    save = ratio * stall_per_work
    restarting = -math.expm1(-restart_per_mtbf) * (1 - waiting)
    return Losses(
        save_ratio=save,
        rework_ratio=1 - waiting - restarting - save - ratio,
        restart_ratio=restarting,
        spares_ratio=waiting,
    )


def _waiting_ratio(mtbf: float, num_spares: int | None, known: Mapping[str, float]) -> float:
    if num_spares is None:
        return 0.0
    load = nodes_in_repair(mtbf_s=mtbf, repair_s=known["repair_s"], replaced_ratio=known["replaced_ratio"])
    return float(spares_exhausted_ratio(num_spares=num_spares, nodes_in_repair=load))


def _check(*, num_devices: int, stall_s: float, interval_s: float | None, num_spares: int | None) -> None:
    if num_devices < 1:
        raise InputError("the number of devices must be positive", got=num_devices, allowed=">= 1")
    if not stall_s > 0:
        raise InputError(
            "the stall of a checkpoint must be positive",
            got=stall_s,
            allowed="> 0 s",
            hint="even an asynchronous save has a barrier; give 0.1 s for a very good one",
        )
    if interval_s is not None and not interval_s > 0:
        raise InputError("the checkpoint interval must be positive", got=interval_s, allowed="> 0 s")
    if num_spares is not None and num_spares < 0:
        raise InputError("the number of spare nodes cannot be negative", got=num_spares, allowed=">= 0")


# --- recovery: costs of a checkpoint and of a restart, and the spare nodes that a run needs ---

# Times that are published for no system are assumptions of the catalogue (`catalog.reliability`). Each function takes
# `given`, a mapping from the name of an assumption to the value that the caller knows better.


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """Cost of one checkpoint: `stall_s` (delta) blocks training, `lag_s` (L) passes until it can be
    restored."""

    stall_s: Array
    lag_s: Array = 0.0


@dataclass(frozen=True, kw_only=True)
class RestartCost:
    """The parts of R: notice, get nodes and start processes, read the checkpoint, reach full speed."""

    detect_s: Array
    reschedule_s: Array
    load_s: Array
    warm_up_s: Array

    @property
    def total_s(self) -> Array:
        return self.detect_s + self.reschedule_s + self.load_s + self.warm_up_s


def checkpoint_cost(
    *, bytes_per_device: Array, num_devices: Array, given: Mapping[str, float] | None = None, asynchronous: bool = True
) -> CheckpointCost:
    """Stall and lag of one save.

    An asynchronous save blocks for a fixed part and the copy to host memory, then writes behind the next
    steps. A blocking one waits for storage, whose rate is the whole cluster's.
    """
    known = reliability.assumed(given)
    write_s = bytes_per_device * num_devices / known["storage_bytes_per_s"]
    if not asynchronous:
        return CheckpointCost(stall_s=known["save_overhead_s"] + write_s)
    copy_s = bytes_per_device / known["staging_bytes_per_s"]
    return CheckpointCost(stall_s=known["save_overhead_s"] + copy_s, lag_s=write_s)


def restart_cost(
    *, bytes_per_device: Array, num_devices: Array, given: Mapping[str, float] | None = None
) -> RestartCost:
    """The parts of R. Every state is read from storage once; replicas get it over the network."""
    known = reliability.assumed(given)
    return RestartCost(
        detect_s=known["detect_s"],
        reschedule_s=known["reschedule_s"],
        load_s=bytes_per_device * num_devices / known["storage_bytes_per_s"],
        warm_up_s=known["warm_up_s"],
    )


def nodes_in_repair(*, mtbf_s: Array, repair_s: Array, replaced_ratio: Array = 1.0) -> Array:
    """Expected number of nodes out of service: rho = replaced_ratio * repair / M (Little's law)."""
    return replaced_ratio * repair_s / mtbf_s


def spares_exhausted_ratio(*, num_spares: int, nodes_in_repair: Array) -> Array:
    """Share of time that the run waits for a node, with k spares.

    While it waits nothing fails, so at most k + 1 nodes are in repair: Erlang's loss formula B(k + 1, rho),
    by its recursion, valid for any distribution of repair times (A. K. Erlang 1917; L. Takacs 1969 for the
    insensitivity).
    """
    blocked = np.ones_like(nodes_in_repair, dtype=float)
    for servers in range(1, num_spares + 2):
        blocked = nodes_in_repair * blocked / (servers + nodes_in_repair * blocked)
    return blocked[()]


def spares_needed(*, nodes_in_repair: float, waiting_ratio: float = 0.001) -> int:
    """The smallest number of spare nodes with which the run waits at most `waiting_ratio` of the time.

    >>> spares_needed(nodes_in_repair=10.0)
    20
    """
    if not 0 < waiting_ratio < 1:
        raise InputError("the share of waiting must be inside (0, 1)", got=waiting_ratio)
    blocked, servers = 1.0, 0
    while blocked > waiting_ratio or servers == 0:
        servers += 1
        blocked = nodes_in_repair * blocked / (servers + nodes_in_repair * blocked)
    return servers - 1
