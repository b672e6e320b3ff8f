"""Search of serving layouts: most tokens/s under bounds of TTFT and ITL, and the front of throughput and interactivity.

For every legal layout of the cluster the largest load that keeps both bounds is found; the best layout has most output
tokens/s. Latencies, rate and requests in flight mostly rise with the requests on a replica, so the end of the loads
that keep the bounds is bracketed; loads near each other are looked at for where they do not. Without a rate to serve,
all devices are used, so price and energy per token rank as throughput does.

With a rate, the fewest devices win that serve it within the bounds: they are the cheapest. Simulated arrivals judge,
with as many requests as an answer has. What they cannot keep is not simulated: numbers of replicas that finish fewer
requests than arrive, and layouts on which one request by itself breaks a bound. More replicas serve a rate no later,
so the fewest of a layout are found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from math import inf

import numpy as np

from meshwright.arrays import FloatArray, Mask
from meshwright.errors import InfeasibleError
from meshwright.inference.arrivals import (
    FEW_REQUESTS,
    REQUESTS,
    ArrivalEstimate,
    LatencyLimits,
    Replicas,
    Simulated,
    arrivals_named,
    capacities_per_s,
    estimate_arrivals,
    replicas_of,
    simulate,
)
from meshwright.inference.capacity import Reserve
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.estimate import LoadEstimate, estimate_load, estimate_rate
from meshwright.inference.formats import StorageFormat
from meshwright.inference.layout import ServingLayout, legal_layouts
from meshwright.inference.server import LEAST, Server, crossing, full, rate_load, state, states
from meshwright.inference.serving import BatchLimit, EngineTraits, RequestLoad, Steady
from meshwright.inference.work import Served
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model

MAX_LAYOUTS = 400
NEAR = 0.005  # logarithm of the ratio of two loads, one of which is as good as those between


@dataclass(frozen=True, kw_only=True)
class ServingQuestion:
    """Model, cluster, load and bounds of a search. The load's concurrency is what the search chooses."""

    model: Model
    cluster: Cluster
    weights: StorageFormat
    cache: StorageFormat
    engine: EngineTraits
    load: RequestLoad
    bounds: LatencyLimits
    requests_per_s: float | None = None
    arrivals: str = "poisson"  # of these requests, as `arrivals_named` reads it
    seed: int = 0  # of the arrivals
    disaggregated: bool = False  # also try replicas that only prefill
    reserve: Reserve
    calibration: ServingCalibration = field(default_factory=shipped_constants)

    def served(self, layout: ServingLayout) -> Served:
        """The model on one layout."""
        return Served(model=self.model, cluster=self.cluster, weights=self.weights, cache=self.cache, layout=layout)

    def server(self, layout: ServingLayout, prefill: int) -> Server:
        """The server on one layout, `prefill` of whose replicas only prefill."""
        return Server(
            of=self.served(layout), engine=self.engine, reserve=self.reserve, calibration=self.calibration,
            prefill_replicas=prefill,
        )  # fmt: skip

    @cached_property
    def simulated(self) -> Callable[[ServingLayout, int, float, int], Simulated | None]:
        """Arrivals by layout, replicas that only prefill, rate and number of requests."""

        @cache
        def one(layout: ServingLayout, prefill: int) -> Replicas:
            return replicas_of(self.server(layout, prefill), self.load)

        @cache
        def found(layout: ServingLayout, prefill: int, rate: float, requests: int) -> Simulated | None:
            split = min(prefill, 1)
            alike = one(replace(layout, replicas=1 + split), split)
            arrivals = arrivals_named(self.arrivals, rate)
            return simulate(self.server(layout, prefill), self.load, arrivals, self.seed, requests, alike)

        return found


@dataclass(frozen=True, kw_only=True)
class LayoutPoint:
    """One layout under one load, without intervals."""

    layout: ServingLayout
    prefill_replicas: int
    concurrency: float
    bound_by: str
    ttft_s: float
    itl_s: float
    output_tokens_per_s: float
    requests_per_s: float

    @property
    def tokens_per_s_per_device(self) -> float:
        """Output tokens/s of all devices, per device."""
        return self.output_tokens_per_s / self.layout.num_devices

    @property
    def interactivity(self) -> float:
        """Output tokens/s of one user."""
        return 1 / self.itl_s if self.itl_s else inf

    def keeps(self, bounds: LatencyLimits) -> bool:
        """Return True if both latencies are within their bounds."""
        return self.ttft_s <= bounds.ttft_s and self.itl_s <= bounds.itl_s

    def describe(self) -> str:
        """Return layout and load."""
        split = f", {self.prefill_replicas} of them prefill" if self.prefill_replicas else ""
        return f"{self.layout.describe()}{split}, {self.concurrency:,.0f} in flight"

    def as_json(self) -> dict[str, object]:
        return {
            "layout": self.layout, "prefill_replicas": self.prefill_replicas, "concurrency": self.concurrency,
            "bound_by": self.bound_by, "ttft_s": self.ttft_s, "itl_s": self.itl_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_s_per_device": self.tokens_per_s_per_device,
            "output_tokens_per_s_per_user": self.interactivity, "requests_per_s": self.requests_per_s,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayoutVerdict:
    """The best point of one layout, and why no more: the bound that the next load breaks, or what does not fit."""

    layout: ServingLayout
    prefill_replicas: int
    best: LayoutPoint | None
    stopped_by: str


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """Result of the search."""

    best: LayoutPoint | None
    verdicts: Sequence[LayoutVerdict]  # best first; those without a point last
    front: Sequence[LayoutPoint]  # throughput per device falls as interactivity rises
    num_points: int


def search_layouts(question: ServingQuestion) -> ServingSearch:
    """Cost every layout under every load."""
    verdicts, points, counts = [], [], []
    for layout, prefill in _candidates(question):
        asked = question.server(layout, prefill)
        try:
            limit, places = full(asked, question.load)
            points += _grid(asked, question.load, limit, places)
            if question.requests_per_s is None:
                verdicts.append(
                    _most_finished(question, asked, limit, places, _verdict(question, asked, limit, places))
                )
            else:
                counts += _counts(question, asked)
        except InfeasibleError as error:
            why = error.message.partition(f"{layout.describe()}: ")[2] or error.message  # a verdict names its layout
            verdicts.append(LayoutVerdict(layout=layout, prefill_replicas=prefill, best=None, stopped_by=why))
    verdicts += _by_arrivals(question, counts)
    verdicts.sort(key=partial(_order, question))
    points += [v.best for v in verdicts if v.best is not None]
    best = verdicts[0].best if verdicts else None
    return ServingSearch(best=best, verdicts=verdicts, front=pareto(points), num_points=len(points))


def _order(question: ServingQuestion, verdict: LayoutVerdict) -> tuple[float, float]:
    """Ascending: most throughput, or with a rate to serve the fewest devices and then the shorter ITL."""
    if (point := verdict.best) is None:
        return inf, inf
    by_rate = (point.layout.num_devices, point.itl_s)
    return (-point.output_tokens_per_s, 0.0) if question.requests_per_s is None else by_rate


def _candidates(question: ServingQuestion) -> Iterator[tuple[ServingLayout, int]]:
    layouts = list(legal_layouts(question.model, question.cluster))
    if not layouts:
        raise InfeasibleError(f"no layout of {question.cluster.name} can split {question.model.name}")
    for layout in layouts[:MAX_LAYOUTS]:
        yield layout, 0
        if question.disaggregated and layout.replicas > 1:
            shares = {max(1, min(round(layout.replicas * s / 8), layout.replicas - 1)) for s in range(1, 8)}
            every = range(1, layout.replicas)
            yield from ((layout, prefill) for prefill in (sorted(shares) if question.requests_per_s is None else every))


def _grid(asked: Server, load: RequestLoad, limit: BatchLimit, places: float) -> list[LayoutPoint]:
    """Points of powers of two requests in flight on each replica, and of all that fit."""
    most = float(limit.sequences)
    batches = np.append(2.0 ** np.arange(np.ceil(np.log2(most))), most)
    found = states(asked, load, batches)
    points = [_point(asked, load, limit, found, i) for i in range(len(batches))]
    return [point for point in points if point.concurrency <= places]


def _point(asked: Server, load: RequestLoad, limit: BatchLimit, found: Steady, index: int = 0) -> LayoutPoint:
    values = np.broadcast_arrays(found.in_flight, found.ttft_s, found.itl_s, found.output_tokens_per_s)
    in_flight, ttft, itl, rate = (float(value.flat[index]) for value in values)
    return LayoutPoint(
        layout=asked.of.layout, prefill_replicas=asked.prefill_replicas, concurrency=in_flight,
        bound_by=limit.binds, ttft_s=ttft, itl_s=itl, output_tokens_per_s=rate,
        requests_per_s=rate / load.output_tokens,
    )  # fmt: skip


def _at(asked: Server, load: RequestLoad) -> LayoutPoint:
    """The point of a load, as `estimate_load` computes it."""
    return _point(asked, load, *state(asked, load))


def _verdict(question: ServingQuestion, asked: Server, limit: BatchLimit, places: float) -> LayoutVerdict:
    best, stopped_by = None, ""
    for low, high in _pieces(asked, limit):
        batch = _last_kept(question, asked, places, low, high)
        if batch is not None:
            best, why = _most_in_flight(question, asked, batch, limit, places)
            stopped_by = why if best is not None else stopped_by or why
        if best is not None:
            break
    if not stopped_by:
        single = _at(asked, replace(question.load, concurrency=1.0))
        stopped_by = _broken(question.bounds, single.ttft_s, single.itl_s, f"at {single.concurrency:,.0f} in flight")
    return LayoutVerdict(
        layout=asked.of.layout, prefill_replicas=asked.prefill_replicas, best=best, stopped_by=stopped_by
    )


def _most_finished(
    question: ServingQuestion, asked: Server, limit: BatchLimit, places: float, verdict: LayoutVerdict
) -> LayoutVerdict:
    """The verdict, or the point of another load that has a higher rate.

    Prompts hide behind the weights that a step reads, until the tokens that it decodes hide behind them as well: then
    more requests finish fewer. Latencies fall where a second request comes to a replica, or fills the tiles, so bounds
    are kept again above loads that break them. Where more requests take no less time a share of them has that share
    of the rate at least, so of loads that are `NEAR` each other one is that near the best.
    """
    if asked.prefill_replicas:
        return verdict
    replicas, most = asked.of.layout.replicas, max(places, 1.0)
    loads = np.floor(np.geomspace(1.0, most, math.ceil(math.log(most) / NEAR) + 1))
    tiled = [math.ceil(low * replicas) for low, _ in _pieces(asked, limit)]
    loads = np.unique(np.append(loads, [n for n in tiled if 1 <= n <= most]))
    found, bounds = states(asked, question.load, loads / replicas), question.bounds
    kept = (found.ttft_s <= bounds.ttft_s) & (found.itl_s <= bounds.itl_s)
    at = float(loads[np.argmax(np.where(kept, found.output_tokens_per_s, 0.0))])
    best = _at(asked, replace(question.load, concurrency=at))
    least = verdict.best.output_tokens_per_s if verdict.best else 0.0
    if not best.keeps(bounds) or best.output_tokens_per_s <= least:
        return verdict
    more = _at(asked, replace(question.load, concurrency=at + 1))
    why = "more in flight finish fewer"
    if not more.keeps(bounds):
        why = _broken(bounds, more.ttft_s, more.itl_s, f"at {more.concurrency:,.0f} in flight")
    return replace(verdict, best=best, stopped_by=why)


def _pieces(asked: Server, limit: BatchLimit) -> Iterator[tuple[float, float]]:
    """Ranges of requests on a replica in which latencies and rate only rise, the largest first.

    A step becomes faster in one place: where its GEMMs have enough tokens for the engine's tiles.
    """
    layout, most = asked.of.layout, float(limit.sequences)
    tiled = float(asked.engine.tile_tokens * layout.attention_data * layout.pipeline)
    if 1 < tiled < most:
        yield tiled, most
        most = float(np.nextafter(tiled, 0.0))
    yield 0.0, most


def _last_kept(question: ServingQuestion, asked: Server, places: float, low: float, high: float) -> float | None:
    """Most requests on a replica, of a piece, under which the bounds are kept."""
    bounds = question.bounds

    def kept(batches: FloatArray) -> Mask:
        found = states(asked, question.load, batches)
        return (found.ttft_s <= bounds.ttft_s) & (found.itl_s <= bounds.itl_s) & (found.in_flight <= places)

    batch, _ = crossing(kept, high, low)
    return batch if np.all(kept(np.array([batch]))) else None


def _most_in_flight(
    question: ServingQuestion, asked: Server, batch: float, limit: BatchLimit, places: float
) -> tuple[LayoutPoint | None, str]:
    """The point of the largest whole number of requests that keeps the bounds, and what stops the next."""
    full_batch = batch == limit.sequences
    if full_batch and not asked.prefill_replicas:
        return _at(asked, replace(question.load, concurrency=places)), BOUND_BY[limit.binds]
    around = math.floor(float(np.squeeze(states(asked, question.load, batch).in_flight))) + 1
    stopped_by = BOUND_BY[limit.binds if full_batch else "prefill"]
    for in_flight in range(min(around, math.floor(places)), max(around - 3, 0), -1):
        point = _at(asked, replace(question.load, concurrency=float(in_flight)))
        if point.keeps(question.bounds):
            return point, stopped_by
        stopped_by = _broken(question.bounds, point.ttft_s, point.itl_s, f"at {point.concurrency:,.0f} in flight")
    return None, stopped_by


@dataclass(frozen=True, eq=False)
class _Counts:
    """Numbers of replicas of a layout that may serve a rate: the simulation keeps none of the others.

    More replicas serve it no later: they are all inside a scale-up domain, over whose links replicas that only prefill
    send the cache of prompts, or all beyond it.
    """

    question: ServingQuestion
    layout: ServingLayout
    prefill: int
    counts: range

    def server(self, replicas: int) -> Server:
        return self.question.server(replace(self.layout, replicas=replicas), self.prefill)

    def simulated(self, replicas: int, requests: int = REQUESTS) -> Simulated | None:
        layout = replace(self.layout, replicas=replicas)
        return self.question.simulated(layout, self.prefill, self.question.requests_per_s or 0.0, requests)

    def keeps(self, replicas: int, requests: int = REQUESTS) -> bool:
        return (found := self.simulated(replicas, requests)) is not None and found.keeps(self.question.bounds)

    def breaking(self, replicas: int) -> Simulated | None:
        """Few requests that break a bound by so much that all of them would; None where all have to decide."""
        found, bounds = self.simulated(replicas, FEW_REQUESTS), self.question.bounds
        if found is None:
            return None
        latencies = zip(found.bounded(bounds), found.half_widths(bounds), (bounds.ttft_s, bounds.itl_s), strict=True)
        is_broken = any(s > limit + max(CLEAR_RATIO * limit, CLEAR_WIDTHS * half_s) for s, half_s, limit in latencies)
        return found if is_broken else None

    def fewest(self, most: int) -> int | None:
        """The fewest replicas that keep the bounds, up to `most`: looked for with few requests, found with all.

        Few requests can be far off near a bound, so strides from there double until some keep the bounds and fewer do
        not.
        """
        if self.breaking(most):
            return None
        some = self.counts[: most - self.counts[0] + 1]
        high = bisect_left(some, True, hi=len(some) - 1, key=partial(self.keeps, requests=FEW_REQUESTS))
        low, stride = high - 1, 1
        while not self.keeps(some[high]):
            if high == len(some) - 1:
                return None
            low, high, stride = high, min(high + stride, len(some) - 1), 2 * stride
        while low >= 0 and self.keeps(some[low]):
            low, high, stride = low - stride, low, 2 * stride
        return some[bisect_left(some, True, max(low + 1, 0), high, key=self.keeps)]

    def broken_by_one(self) -> str:
        """The bound that a request by itself breaks; empty where it keeps them, or others can make it faster."""
        load, bounds = self.question.load, self.question.bounds
        if self.question.engine.tile_tokens > 1 or load.input_spread or load.output_spread:
            return ""
        found = simulate(self.server(self.counts[0]), load, arrivals_named("constant", LEAST), requests=1)
        broken = found is not None and not found.keeps(bounds)
        return _broken(bounds, *found.means[:2], "of a request by itself") if found and broken else ""

    def closed_loop_itl_s(self, devices: int) -> float:
        """ITL of the closed loop that finishes the rate."""
        asked, load = self.server(devices // self.layout.replica_devices), self.question.load
        try:
            return _at(asked, rate_load(asked, load, self.question.requests_per_s or 0.0)).itl_s
        except InfeasibleError:
            return inf

    def verdict(self, replicas: int | None, why: str = "rate is met") -> LayoutVerdict:
        """The simulated arrivals on so many replicas; None: on none."""
        found, rate, point = replicas and self.simulated(replicas), self.question.requests_per_s or 0.0, None
        if replicas and found:
            ttft_s, itl_s, request_s = found.means
            point = LayoutPoint(
                layout=replace(self.layout, replicas=replicas), prefill_replicas=self.prefill, bound_by="concurrency",
                concurrency=rate * request_s, ttft_s=ttft_s, itl_s=itl_s, requests_per_s=rate,
                output_tokens_per_s=rate * self.question.load.output_tokens,
            )  # fmt: skip
        return LayoutVerdict(layout=self.layout, prefill_replicas=self.prefill, best=point, stopped_by=why)


def _counts(question: ServingQuestion, asked: Server) -> list[_Counts]:
    """Numbers of replicas that finish more than arrives, `asked.prefill_replicas` of which only prefill.

    Raises InfeasibleError where all do not.
    """
    layout, rate, prefill = asked.of.layout, question.requests_per_s or 0.0, asked.prefill_replicas
    decoded, prefilled = capacities_per_s(asked, question.load)
    if rate >= min(decoded, prefilled):
        raise InfeasibleError(f"{min(decoded, prefilled):,.3g} requests/s at most")
    least = prefill + max(math.ceil(rate / decoded * (layout.replicas - prefill) * (1 - 1e-9)), 1)
    inside = asked.of.cluster.fabric.scale_up_domain // layout.replica_devices
    ends = [least - 1, *([inside] if prefill and least <= inside < layout.replicas else []), layout.replicas]
    return [_Counts(question, layout, prefill, range(before + 1, last + 1)) for before, last in pairwise(ends)]


def _by_arrivals(question: ServingQuestion, every: Sequence[_Counts]) -> list[LayoutVerdict]:
    """Verdicts of simulated arrivals: the fewest devices, then as many with a shorter ITL."""
    fewest, verdicts = question.cluster.num_devices + 1, list[LayoutVerdict]()  # devices
    slow = dict[tuple[ServingLayout, bool, int], str]()  # why more that prefill serve no better; empty: they may
    for one in sorted(every, key=lambda one: one.counts[0] * one.layout.replica_devices):
        size, replicas, like = one.layout.replica_devices, None, (one.layout, one.prefill > 0, one.counts[-1])
        most = min((fewest - 1) // size, one.counts[-1])
        if most < one.counts[0]:
            why = f"needs {one.counts[0] * size} devices or more"
        elif not (why := slow.setdefault(like, "") or one.broken_by_one()) and (replicas := one.fewest(most)) is None:
            why = f"needs more than {most * size} devices"
            if (found := one.breaking(most) or one.simulated(most)) is not None:
                ttft_s, itl_s = found.bounded(question.bounds)
                whose = "mean" if (of := question.bounds.percentile) is None else f"p{of:g}"
                broken = _broken(question.bounds, ttft_s, itl_s, f"({whose}) on {most * size} devices")
                why = broken if most == one.counts[-1] else why
                slow[like] = why if itl_s > question.bounds.itl_s else ""  # the more that prefill, the fewer decode
        fewest = fewest if replicas is None else replicas * size
        verdicts.append(one.verdict(replicas, why) if why else one.verdict(replicas))
    equals = [one for one in every if not fewest % (n := one.layout.replica_devices) and fewest // n in one.counts]
    for one in sorted(equals, key=lambda one: one.closed_loop_itl_s(fewest)):
        if one.keeps(replicas := fewest // one.layout.replica_devices):
            others = (v for v in verdicts if (v.layout, v.prefill_replicas) != (one.layout, one.prefill))
            return [one.verdict(replicas), *others]
    return verdicts


CLEAR_RATIO, CLEAR_WIDTHS = 0.1, 5.0
"""Over a bound, and of the half width of a 95 % interval: means of few and of all requests differ by a few percent."""
BOUND_BY = {
    "kv_cache": "KV cache is full", "engine": "sequences of the engine", "prefill": "replicas that prefill",
    "prompts": "every step is full of prompts",
}  # fmt: skip


def _broken(bounds: LatencyLimits, ttft_s: float, itl_s: float, under: str) -> str:
    """The bound that latencies break."""
    name, value, limit = ("ITL", itl_s, bounds.itl_s) if itl_s > bounds.itl_s else ("TTFT", ttft_s, bounds.ttft_s)
    return f"{name} {value * 1e3:,.2f} ms {under}, bound {limit * 1e3:,.6g} ms"


def pareto(points: Sequence[LayoutPoint]) -> list[LayoutPoint]:
    """Points that no other point beats in throughput per device and interactivity, by rising interactivity."""
    front: list[LayoutPoint] = []
    for point in sorted(points, key=lambda p: (-p.interactivity, -p.tokens_per_s_per_device)):
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device * (1 + 1e-9):
            front.append(point)
    return front[::-1]


def answer_of(question: ServingQuestion, point: LayoutPoint) -> tuple[LoadEstimate, ArrivalEstimate | None]:
    """The estimate of a point of the search, and its latencies under arrivals; None without a rate."""
    load, rate, asked = question.load, question.requests_per_s, question.server(point.layout, point.prefill_replicas)
    if rate is None:
        return estimate_load(asked, replace(load, concurrency=point.concurrency)), None
    under = estimate_arrivals(
        asked, load, question.arrivals, rate, bounds=question.bounds, seed=question.seed,
        simulated=lambda rate: question.simulated(point.layout, point.prefill_replicas, rate, REQUESTS),
    )  # fmt: skip
    return estimate_rate(asked, load, rate, under.simulated), under
