"""Goodput of a run that is played failure by failure: its spread, its restarts, and the hours lost by cause.

Failures come at random with the rate of `catalog.reliability`, during restarts and saves too; a restart that is hit
begins again. A failure that takes a node out gets a spare, or waits until a node is repaired. Repair times are
exponential, all spares are there at the beginning, and nothing fails while the run waits. A save begins when the last
one is written. `cost.goodput` has the means of the same process over an endless run; this has its chance over days.

The moments of failures depend on no checkpoint interval, so runs are drawn once and every interval is tried on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappushpop

import numpy as np
from numpy.typing import NDArray

from meshwright.catalog import reliability
from meshwright.cost.goodput import CheckpointCost, RestartCost, estimate_goodput, nodes_in_repair, spares_needed
from meshwright.errors import InputError
from meshwright.units import DAY_S, HOUR_S

NUM_RUNS, SEED = 200, 0
MOST_FAILURES = 4e6
"""Of all runs together, which take some seconds."""
INTERVAL_FACTORS = 2.0 ** np.linspace(-2, 2, 33)
"""Intervals that are tried, over that of the closed form."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CauseLosses:
    """Failures of one cause in a run, and the hours of lost work, restart and waiting that they cost: means."""

    failures: float
    lost_h: float


@dataclass(frozen=True, kw_only=True)
class SimulatedGoodput:
    """Goodput of `num_runs` runs of `days` days, in (0, 1]; counts and hours are means of a run.

    Attributes:
        num_spares: spare nodes.
        interval_s: useful work between two checkpoints, that of the closed form.
        mean, p10, p90: goodput at this interval over the runs.
        closed_form: goodput of `estimate_goodput` with these spares.
        best_interval_s: the interval with the highest mean of those that were tried.
        best_mean: that mean.
        restarts_hit: restarts during which something failed; each is one of `restarts`.
        saves_hit: saves that a failure made useless.
        lost_h: hours by kind: save, rework, restart, spares.
        causes: failures and hours by their cause.
    """

    days: float
    num_runs: int
    seed: int
    num_spares: int
    interval_s: float
    mean: float
    p10: float
    p90: float
    closed_form: float
    best_interval_s: float
    best_mean: float
    restarts: float
    restarts_hit: float
    saves_hit: float
    lost_h: dict[str, float]
    causes: dict[str, CauseLosses]


@dataclass(frozen=True, kw_only=True)
class _Attempts:
    """Attempts to train, of all runs one after the other: a restart, training, a failure, a wait. Seconds."""

    training_s: Floats
    restarting_s: Floats
    waiting_s: Floats
    cause: NDArray[np.int64]
    is_last: NDArray[np.bool_]  # of its run: the days end it, and no failure

    def work_s(self, interval_s: float, stall_s: float, lag_s: float) -> tuple[Floats, Floats, Floats]:
        """Seconds of work that lasts and of its saves, and saves in vain, by attempt. The last one loses nothing."""
        cycle = stall_s + max(interval_s, lag_s)  # the next save waits until the last one is written
        num_saved = np.floor(np.maximum(self.training_s - np.where(self.is_last, 0.0, lag_s), 0.0) / cycle)
        rest = np.where(self.is_last, self.training_s - num_saved * cycle, 0.0)
        unsaved = np.minimum(rest, interval_s)
        num_begun = np.floor((self.training_s - interval_s) / cycle) + 1
        hit = np.where(self.is_last, 0.0, np.maximum(num_begun - num_saved, 0.0))
        return num_saved * interval_s + unsaved, num_saved * (cycle - interval_s) + rest - unsaved, hit


def simulate_goodput(
    *,
    num_devices: int,
    checkpoint: CheckpointCost,
    restart: RestartCost,
    days: float,
    interval_s: float | None = None,
    num_spares: int | None = None,
    given: Mapping[str, float] | None = None,
    num_runs: int = NUM_RUNS,
    seed: int = SEED,
) -> SimulatedGoodput:
    """Play `num_runs` runs of `days` days; the same seed gives the same answer.

    `interval_s` None: that of the closed form. `num_spares` None: as many as keep a run waiting at most 0.1 % of the
    time. Raises InputError for values that make no sense, and for more failures than are played in seconds.
    """
    known, rate = reliability.assumed(given), reliability.failure_range().value
    mtbf_s, end_s = rate.device_mtbf_s / num_devices, days * DAY_S
    if num_runs * end_s / mtbf_s > MOST_FAILURES:
        allowed = f"at most {MOST_FAILURES * mtbf_s / num_runs / DAY_S:.3g} days on {num_devices:,} devices"
        raise InputError("too many failures to simulate", got=f"{days:g} days", allowed=allowed)
    if num_spares is None:
        away = nodes_in_repair(mtbf_s=mtbf_s, repair_s=known["repair_s"], replaced_ratio=known["replaced_ratio"])
        num_spares = spares_needed(nodes_in_repair=float(away))
    closed = estimate_goodput(
        num_devices=num_devices, checkpoint=checkpoint, restart=restart, interval_s=interval_s,
        num_spares=num_spares, given=given,
    )  # fmt: skip
    counts = np.array(list(rate.causes.values()), dtype=float)
    draw = np.random.default_rng(seed)
    played = _joined(
        _run(draw, mtbf_s, float(restart.total_s), end_s, num_spares, counts / counts.sum(), known)
        for _ in range(num_runs)
    )
    costs = (float(checkpoint.stall_s), float(checkpoint.lag_s))
    tried = closed.interval_s * INTERVAL_FACTORS
    means = [played.work_s(tau, *costs)[0].sum() / (num_runs * end_s) for tau in tried]
    work_s, save_s, saves_hit = played.work_s(closed.interval_s, *costs)
    ratios = np.add.reduceat(work_s, np.flatnonzero(np.roll(played.is_last, 1))) / end_s
    p10, p90 = np.quantile(ratios, (0.1, 0.9))
    rework_s = played.training_s - work_s - save_s
    lost_s = {"save": save_s, "rework": rework_s, "restart": played.restarting_s, "spares": played.waiting_s}
    return SimulatedGoodput(
        days=days, num_runs=num_runs, seed=seed, num_spares=num_spares, interval_s=closed.interval_s,
        mean=float(work_s.sum()) / (num_runs * end_s), p10=float(p10), p90=float(p90), closed_form=closed.value,
        best_interval_s=float(tried[np.argmax(means)]), best_mean=float(max(means)),
        restarts=float((~played.is_last).sum()) / num_runs,
        restarts_hit=float((~played.is_last & (played.training_s == 0)).sum()) / num_runs,
        saves_hit=float(saves_hit.sum()) / num_runs,
        lost_h={kind: float(s.sum()) / num_runs / HOUR_S for kind, s in lost_s.items()},
        causes=_by_cause(played, rework_s, list(rate.causes), num_runs),
    )  # fmt: skip


def _run(
    draw: np.random.Generator, mtbf_s: float, restart_s: float, end_s: float, num_spares: int, shares: Floats,
    known: Mapping[str, float],
) -> _Attempts:  # fmt: skip
    """One run. Its first attempt begins without a restart."""
    until_s = draw.exponential(mtbf_s, size=16)
    while until_s.sum() < end_s:
        until_s = np.append(until_s, draw.exponential(mtbf_s, size=len(until_s)))
    until_s = until_s[: np.searchsorted(np.cumsum(until_s), end_s) + 1]
    is_replaced = draw.random(len(until_s)) < known["replaced_ratio"]
    repair_s = draw.exponential(known["repair_s"], size=len(until_s))
    waiting_s = _waits_s(np.cumsum(until_s), is_replaced, repair_s, num_spares)
    begun_s = np.cumsum(until_s + waiting_s) - until_s - waiting_s
    kept = slice(int((begun_s + until_s < end_s).sum()) + 1)  # the last attempt is the one that no failure ends
    spent_s = np.clip(end_s - begun_s, 0.0, until_s)
    restarting_s = np.minimum(spent_s, restart_s)
    restarting_s[0] = 0.0
    training_s, cause = (spent_s - restarting_s)[kept], draw.choice(len(shares), size=len(until_s), p=shares)
    return _Attempts(
        training_s=training_s,
        restarting_s=restarting_s[kept],
        waiting_s=np.clip(end_s - begun_s - until_s, 0.0, waiting_s)[kept],
        cause=cause[kept],
        is_last=np.arange(len(training_s)) == len(training_s) - 1,
    )


def _waits_s(failed_s: Floats, is_replaced: NDArray[np.bool_], repair_s: Floats, num_spares: int) -> Floats:
    """Seconds until a spare is there, by failure; `failed_s` are their moments if nothing waited."""
    waits_s, waited_s = np.zeros_like(failed_s), 0.0
    free_s = [0.0] * num_spares  # when each node that does not train can be had: a heap
    failures = np.flatnonzero(is_replaced)
    for index, at_s, repair in zip(failures, failed_s[failures].tolist(), repair_s[failures].tolist(), strict=True):
        now_s = at_s + waited_s
        wait_s = heappushpop(free_s, now_s + repair) - now_s
        if wait_s > 0:
            waits_s[index] = wait_s
            waited_s += wait_s
    return waits_s


def _joined(runs: Iterable[_Attempts]) -> _Attempts:
    columns = [vars(run) for run in runs]
    return _Attempts(**{name: np.concatenate([c[name] for c in columns]) for name in columns[0]})


def _by_cause(played: _Attempts, rework_s: Floats, names: list[str], num_runs: int) -> dict[str, CauseLosses]:
    """Of each cause the work that its failures lost, the waits for a spare, and the restarts that follow them."""
    after_s = np.append(played.restarting_s[1:], 0.0)  # a run's first attempt has none
    failed = ~played.is_last
    lost_s = (rework_s + played.waiting_s + after_s)[failed]
    counts = np.bincount(played.cause[failed], minlength=len(names))
    hours = np.bincount(played.cause[failed], weights=lost_s, minlength=len(names)) / HOUR_S
    return {
        name: CauseLosses(failures=float(count) / num_runs, lost_h=float(lost) / num_runs)
        for name, count, lost in zip(names, counts, hours, strict=True)
    }
