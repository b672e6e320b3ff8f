"""Latencies of a server under arrivals: percentiles from a simulation of its replicas with the estimate's step times.

Lengths of requests are log-normal where the load states a spread: a prompt takes its share of the mean prompt's time,
a decode step is that of the mean context. Requests are dealt to the replicas in turn, so one of R replicas gets every
R-th: its gaps are sums of R gaps, which have a gamma distribution again. Disaggregated replicas are simulated in the
smallest group with the same ratio. A request is outside of all steps first (`ServingRates.request_s`). Pipeline stages
that compute n prompts at once are one place that is n times as fast, and a delay (Seidmann et al. 1987). The delay
counts the time that a prompt adds to decode steps: these take the time of all stages already.

The load is stable if fewer requests arrive than the server finishes with all places taken. Requests that are computed
again then, because the cache is full, count: a queue that has formed once must drain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from math import gcd, inf
from typing import Any

import numpy as np

from meshwright.arrays import FloatArray, scalar
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.batching import BatchingReplica, serve
from meshwright.inference.rates import NOTHING, Decoded, decoded_of, step_seconds
from meshwright.inference.server import Server, full, rate_load, states, transfer_s
from meshwright.inference.serving import (
    BatchLimit,
    RequestLoad,
    batch_limit,
    outside_s,
    prefill_steps_s,
    recomputed,
    request_work,
    started_ahead_s,
    steady,
)
from meshwright.records.serving import Arrivals, Load, drawn_gaps, gap_seconds

REQUESTS = 10_000
"""Whose latencies are taken, of one group of replicas: 100 are above the 99th percentile."""

FEW_REQUESTS = REQUESTS // 10
"""With which a search looks for numbers of replicas that all of them then judge."""

EDGE, REPLACED = 0.1, 3.0  # requests before and after these: this share of them, and so often those in flight
RAREST = 1e-6  # of the capacity: requests that are rarer do not meet
BATCHES, STUDENT_95 = 20, 2.093  # of requests in turn; t of 19 degrees of freedom
PARTS = 64  # of a rate, or of the range in which the highest that keeps bounds lies


@dataclass(frozen=True, kw_only=True)
class LatencyLimits:
    """Upper bounds in seconds; infinity: none. Under arrivals: of this percentile of the requests, or of their mean."""

    ttft_s: float = inf
    itl_s: float = inf
    percentile: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is no bound", got=getattr(self, name), allowed="above 0")
        if self.percentile is not None and not 50 <= self.percentile < 100:
            raise InputError("percentile", got=self.percentile, allowed="50 to below 100, such as 99")
        if self.percentile is not None and self.is_empty:
            raise InputError("a percentile without a bound", got=self.percentile, hint="--ttft MS, --itl MS are bounds")

    @property
    def is_empty(self) -> bool:
        return self.ttft_s == self.itl_s == inf


def arrivals_named(text: str, requests_per_s: float) -> Load:
    """Arrivals from their text: poisson, constant, or gamma:CV with the coefficient of variation of the gaps.

    >>> arrivals_named("gamma:2", 5.0).shape
    0.25
    """
    if text in ("poisson", "constant"):
        return Load(arrivals=Arrivals(text), offered_per_s=requests_per_s)
    name, _, variation = text.partition(":")
    try:
        shape = float(variation) ** -2 if name == "gamma" else 0.0
    except (ValueError, ZeroDivisionError):
        shape = 0.0
    if not 1 / 400 <= shape <= 400:
        allowed = "poisson, constant, gamma:CV such as gamma:2 (CV of the gaps, 0.05 to 20; 1 is poisson)"
        raise InputError("arrivals", got=text, allowed=allowed)
    return Load(arrivals=Arrivals.GAMMA, offered_per_s=requests_per_s, shape=shape)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Requests of one group of replicas between warm-up and end, one element each; all times in seconds."""

    arrived_s: FloatArray
    ttft_s: FloatArray
    itl_s: FloatArray  # (end-to-end - TTFT) / (output tokens - 1); 0 for answers of one token
    e2e_s: FloatArray
    queue_share: float  # of the time of a replica, in which a request waited for a place or for other prompts
    in_flight: float  # mean number in this time, on all replicas of the cluster

    def percentiles(self, of: slice = slice(None)) -> dict[str, dict[str, float]]:
        """Mean, p50, p95 and p99 of each latency, interpolated linearly, over all requests or a part of them."""
        found = {"ttft_s": self.ttft_s[of], "itl_s": self.itl_s[of], "e2e_s": self.e2e_s[of]}
        names = ("mean", "p50", "p95", "p99")
        return {
            k: dict(zip(names, (float(s.mean()), *np.percentile(s, (50, 95, 99)).tolist()), strict=True))
            for k, s in found.items()
        }

    @property
    def means(self) -> tuple[float, float, float]:
        """Of TTFT, ITL and end to end."""
        return float(self.ttft_s.mean()), float(self.itl_s.mean()), float(self.e2e_s.mean())

    @property
    def half_difference(self) -> float:
        """Largest difference of a mean or percentile between the two halves of the requests, over its value in all."""
        middle = len(self.e2e_s) // 2
        halves = [self.percentiles(slice(middle)), self.percentiles(slice(middle, None))]
        return max(
            abs(halves[0][name][of] - halves[1][name][of]) / value
            for name, values in self.percentiles().items()
            for of, value in values.items()
            if value > 0
        )

    def good_share(self, bounds: LatencyLimits) -> float:
        """Share of requests within both bounds."""
        return float(np.mean((self.ttft_s <= bounds.ttft_s) & (self.itl_s <= bounds.itl_s)))

    def bounded(self, bounds: LatencyLimits, part: slice = slice(None)) -> tuple[float, float]:
        """TTFT and ITL of the percentile of the bounds, or their means."""
        of, both = bounds.percentile, (self.ttft_s[part], self.itl_s[part])
        ttft_s, itl_s = (s.mean() if of is None else np.percentile(s, of) for s in both)
        return float(ttft_s), float(itl_s)

    def half_widths(self, bounds: LatencyLimits) -> tuple[float, float]:
        """Half widths of their 95 % intervals, in seconds, by batch means (Schmeiser 1982; quantiles: Seila 1982)."""
        ends = np.linspace(0, len(self.e2e_s), BATCHES + 1).astype(int)
        parts = np.array([self.bounded(bounds, slice(*two)) for two in pairwise(ends)])
        ttft_s, itl_s = STUDENT_95 * parts.std(axis=0, ddof=1) / np.sqrt(BATCHES)
        return float(ttft_s), float(itl_s)

    def keeps(self, bounds: LatencyLimits) -> bool:
        """Return True if the percentile of the bounds, or the mean, is within both."""
        ttft_s, itl_s = self.bounded(bounds)
        return ttft_s <= bounds.ttft_s and itl_s <= bounds.itl_s


def capacity_per_s(asked: Server, load: RequestLoad) -> float:
    """Requests/s that the server finishes with all places taken, those computed again included."""
    return min(capacities_per_s(asked, load))


def capacities_per_s(asked: Server, load: RequestLoad) -> tuple[float, float]:
    """The same of the replicas that decode, and of those that only prefill: infinity where there are none."""
    limit, load = full(asked, load)[0], replace(load, concurrency=None, lockstep=False)
    if not asked.prefill_replicas:
        found = steady(request_work(asked.of, load, asked.engine, limit), asked.rates)
        return scalar(found.output_tokens_per_s) / load.output_tokens, inf
    found = states(asked, load, limit.sequences)
    pool = asked.prefill_replicas * asked.of.layout.pipeline / scalar(found.prompt.total)
    return scalar(found.output_tokens_per_s) / load.output_tokens, pool


def places(asked: Server, load: RequestLoad) -> BatchLimit:
    """Whole requests that have room on one replica: the simulation has those wait whose prompts wait for others."""
    limit = batch_limit(asked.decoding, replace(load, concurrency=None), asked.engine, asked.reserve, prefills=False)
    return BatchLimit(sequences=float(int(limit.sequences)), binds=full(asked, load)[0].binds)


@dataclass(frozen=True, kw_only=True, eq=False)
class Replicas:
    """A replica that only computes prompts, one that only decodes, and seconds of a request outside of both."""

    prompts: BatchingReplica
    decoding: BatchingReplica
    outside_s: float


def simulate(
    asked: Server, load: RequestLoad, arrivals: Load, seed: int = 0, requests: int = REQUESTS,
    replicas: Replicas | None = None,
) -> Simulated | None:  # fmt: skip
    """Serve `requests` requests of the arrivals, after a warm-up and with others after them.

    None where the rate is at least `capacity_per_s`: the queue has no steady state.
    """
    rate, most = arrivals.offered_per_s or 0.0, capacity_per_s(asked, load)
    if rate >= most:
        return None
    groups, shown = gcd(asked.prefill_replicas, asked.decoding.layout.replicas), max(rate, RAREST * most)
    try:
        in_flight = rate_load(asked, load, shown).concurrency or 0.0
    except InfeasibleError:  # of the mean queue of prompts, which holds no places here
        in_flight = full(asked, load)[1]
    replaced = REPLACED / 2 if requests == FEW_REQUESTS else REPLACED
    edge = int(max(EDGE * requests, replaced * in_flight / groups)) + 1
    one = replace(arrivals, offered_per_s=shown / groups)
    if groups > 1 and arrivals.arrivals is not Arrivals.CONSTANT:
        one = replace(one, arrivals=Arrivals.GAMMA, shape=(arrivals.shape or 1.0) * groups)
    arrived_s = np.cumsum(gap_seconds(one, _gaps(replace(one, offered_per_s=None), requests + 2 * edge, seed)))
    lengths = drawn_lengths(load, len(arrived_s), seed=seed)
    first_s, end_s, queue_s = serve_all(asked, load, arrived_s, groups, lengths, replicas)
    taken, gaps = slice(edge, edge + requests), lengths[:, 1] - 1
    begin, end = arrived_s[edge], arrived_s[edge + requests]
    inside = np.clip(end_s, begin, end) - np.clip(arrived_s, begin, end)
    return Simulated(
        arrived_s=arrived_s[taken], ttft_s=(first_s - arrived_s)[taken], e2e_s=(end_s - arrived_s)[taken],
        itl_s=((end_s - first_s) / np.maximum(gaps, 1) * (gaps > 0))[taken],
        queue_share=queue_s / end_s.max() * groups / asked.of.layout.replicas,
        in_flight=float(inside.sum() / (end - begin)) * groups * rate / shown,
    )  # fmt: skip


def _gaps(load: Load, count: int, seed: int) -> FloatArray:
    """As `drawn_gaps` yields them."""
    return _most_gaps(load, 1 << (count - 1).bit_length(), seed)[:count]


@lru_cache(maxsize=16)
def _most_gaps(load: Load, count: int, seed: int) -> FloatArray:
    return np.fromiter(drawn_gaps(load, seed=seed), np.float64, count)


def drawn_lengths(load: RequestLoad, count: int, *, seed: int) -> FloatArray:
    """Prompt and answer tokens of `count` requests, one row each: log-normal, as the load states mean and spread."""
    variance = np.log1p(np.square([load.input_spread, load.output_spread]))
    means = np.log([load.input_tokens, load.output_tokens]) - variance / 2
    drawn = np.random.default_rng(seed).normal(means, np.sqrt(variance), (count, 2))
    return np.maximum(np.round(np.exp(drawn)), 1.0)


def serve_all(
    asked: Server, load: RequestLoad, arrived_s: FloatArray, groups: int, lengths: FloatArray | None = None,
    replicas: Replicas | None = None,
) -> tuple[FloatArray, FloatArray, float]:  # fmt: skip
    """Times of first and last tokens of requests on one of `groups` groups of replicas, and seconds with a queue."""
    one = replicas or replicas_of(asked, load)
    lengths = drawn_lengths(load, len(arrived_s), seed=0) if lengths is None else lengths
    sizes, steps = lengths[:, 0] / load.input_tokens, (lengths[:, 1] - 1) / (1 + load.accepted_per_step)
    split, ready_s = asked.prefill_replicas // groups, arrived_s + one.outside_s
    if not split:
        return _in_turn(replace(one.decoding, prompt_steps=one.prompts.prompt_steps), 1, ready_s, steps, sizes)
    _, cached_s, queue_s = _in_turn(one.prompts, split, ready_s, np.zeros_like(steps), sizes)
    cached_s += transfer_s(asked.of, load.input_tokens) * sizes
    order, count = np.argsort(cached_s, kind="stable"), asked.of.layout.replicas // groups - split
    first_s, end_s, more_s = _in_turn(one.decoding, count, cached_s[order], steps[order], sizes[order])
    back = np.argsort(order)
    return first_s[back], end_s[back], queue_s + more_s


def _in_turn(one: BatchingReplica, count: int, *each: FloatArray) -> tuple[FloatArray, FloatArray, float]:
    """The same of requests that are dealt to `count` replicas in turn; `each` as `serve` takes it."""
    first_s, end_s, queue_s = np.empty_like(each[0]), np.empty_like(each[0]), 0.0
    for i in range(count):
        first_s[i::count], end_s[i::count], more_s = serve(one, *(values[i::count].tolist() for values in each))
        queue_s += more_s
    return first_s, end_s, queue_s


def replicas_of(asked: Server, load: RequestLoad) -> Replicas:
    """The replicas of a server: those of others with as many devices, however many, are alike."""
    limit, rates, layout = places(asked, load), asked.rates, asked.of.layout
    num_places, load = int(limit.sequences), replace(load, concurrency=None, lockstep=False)
    work = request_work(asked.decoding, load, asked.engine, replace(limit, sequences=np.arange(1.0, num_places + 1)))
    step, one, flat = step_seconds(work.decode, rates), work.take(0).numbers(), rates.numbers()
    step_s = [0.0, *np.ravel(step.total).tolist()]
    rows = decoded_of(step, one.prompt, rates, one.mixes), started_ahead_s(work, step.total)

    @cache
    def decode_of(decoding: int) -> tuple[Decoded, float]:
        if not decoding:
            return NOTHING, 0.0
        decoded, ahead_s = rows
        return decoded.take(decoding - 1).numbers(), float(np.broadcast_to(ahead_s, num_places)[decoding - 1])

    @cache
    def prompts_s(part: float, together: float, decoding: int) -> float:
        decoded, ahead_s = decode_of(decoding)
        added_s = prefill_steps_s(one, flat, part, decoded=decoded, ahead_s=ahead_s, together=together)
        return float(added_s) / layout.pipeline

    again = 0.0 if asked.prefill_replicas else recomputed(load, limit, asked.engine, layout.replicas)
    decoding = BatchingReplica(
        places=num_places, step_s=step_s, prompt_steps=0.0, prompts_s=prompts_s,
        groups=layout.attention_data, stages=layout.pipeline,
        recomputed=again, waited_steps=0.0 if asked.prefill_replicas else float(work.waited_steps),
    )  # fmt: skip
    step_tokens = asked.engine.batch_tokens * layout.attention_data  # where each attention group has prompts
    prompts = replace(decoding, places=10**9, prompt_steps=load.computed_tokens / step_tokens)
    return Replicas(prompts=prompts, decoding=decoding, outside_s=scalar(outside_s(one, rates)))


@dataclass(frozen=True, kw_only=True)
class ArrivalEstimate:
    """Latencies of a load under arrivals; `simulated` is None where the load is not stable."""

    arrivals: str  # as `arrivals_named` reads it
    rate: float  # requests/s that arrive
    seed: int
    capacity_per_s: float  # requests/s with all places taken
    simulated: Simulated | None
    bounds: LatencyLimits
    highest_per_s: float  # rate that keeps the bounds; the capacity without any

    def as_json(self) -> dict[str, Any]:
        found, bounds = self.simulated, None if self.bounds.is_empty else self.bounds
        document: dict[str, Any] = {
            "arrivals": self.arrivals, "requests_per_s": self.rate, "seed": self.seed, "bounds": bounds,
            "is_stable": found is not None, "capacity_requests_per_s": self.capacity_per_s,
            "highest_requests_per_s": self.highest_per_s, "headroom": self.highest_per_s / self.rate,
        }  # fmt: skip
        if found is None:
            return document
        numbers = {"num_requests": len(found.e2e_s), "in_flight": found.in_flight, "queue_share": found.queue_share}
        numbers["half_difference"] = found.half_difference
        if bounds is not None:
            good = found.good_share(bounds)
            numbers |= {"keeps_bounds": found.keeps(bounds), "good_share": good, "goodput_per_s": good * self.rate}
            numbers["half_widths_s"] = dict(zip(("ttft_s", "itl_s"), found.half_widths(bounds), strict=True))
        return document | found.percentiles() | numbers


def estimate_arrivals(
    asked: Server, load: RequestLoad, arrivals: str, rate: float, *, bounds: LatencyLimits, seed: int = 0,
    simulated: Callable[[float], Simulated | None] | None = None,
) -> ArrivalEstimate:  # fmt: skip
    """Simulate a load, and find the highest rate that keeps the bounds, to a 64th of it or of the range.

    simulated: the simulation by rate of a search that keeps its results; None: it is made here.
    """
    one = None if simulated else replicas_of(asked, load)

    def at(rate: float) -> Simulated | None:
        if simulated:
            return simulated(rate)
        return simulate(asked, load, arrivals_named(arrivals, rate), seed, replicas=one)

    most = capacity_per_s(asked, load)
    found, highest = at(rate), most
    if not bounds.is_empty:
        highest, high = (rate, most) if found is not None and found.keeps(bounds) else (0.0, min(rate, most))
        near = (high - highest) / PARTS
        while high - highest > max(near, highest / PARTS):
            middle = (highest + high) / 2
            other = at(middle)
            highest, high = (middle, high) if other is not None and other.keeps(bounds) else (highest, middle)
    return ArrivalEstimate(
        arrivals=arrivals, rate=rate, seed=seed, capacity_per_s=most, simulated=found, bounds=bounds,
        highest_per_s=highest,
    )  # fmt: skip
