"""Search of serving layouts: most tokens/s under bounds of TTFT and ITL, and the front of throughput and interactivity.

For every legal layout of the cluster the largest load that keeps both bounds is found; the best layout has most output
tokens/s. Latencies, rate and requests in flight rise with the requests on a replica, but for one place (`_pieces`), so
the end of the loads that keep the bounds is bracketed. Without a rate to serve, all devices are used, so price and
energy per token rank as throughput does. With a rate, the fewest replicas that finish it within the bounds are taken of
each layout, and the layout with fewest devices, which is the cheapest, wins. Its latencies are those of simulated
arrivals: where these break a bound, it gets more replicas, or another layout wins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from meshwright.arrays import FloatArray, Mask
from meshwright.errors import InfeasibleError
from meshwright.inference.arrivals import (
    ArrivalEstimate,
    LatencyLimits,
    arrivals_named,
    capacity_per_s,
    estimate_arrivals,
    simulate,
)
from meshwright.inference.capacity import Reserve
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.estimate import LoadEstimate, estimate_load, estimate_rate
from meshwright.inference.formats import StorageFormat
from meshwright.inference.layout import ServingLayout, legal_layouts
from meshwright.inference.server import Server, crossing, full, rate_load, state, states
from meshwright.inference.serving import BatchLimit, EngineTraits, RequestLoad, Steady
from meshwright.inference.work import Served
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model

MAX_LAYOUTS = 400


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
    is_simulated: bool = False  # latencies are of arrivals at the asked rate, not of a closed loop that finishes it


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """Result of the search."""

    best: LayoutPoint | None
    verdicts: Sequence[LayoutVerdict]  # best first; those without a point last
    front: Sequence[LayoutPoint]  # throughput per device falls as interactivity rises
    num_points: int


def search_layouts(question: ServingQuestion) -> ServingSearch:
    """Cost every layout under every load."""
    verdicts, points = [], []
    for layout, prefill in _candidates(question):
        asked = question.server(layout, prefill)
        try:
            limit, places = full(asked, question.load)
        except InfeasibleError as error:
            why = error.message.partition(f"{layout.describe()}: ")[2] or error.message  # a verdict names its layout
            verdicts.append(LayoutVerdict(layout=layout, prefill_replicas=prefill, best=None, stopped_by=why))
            continue
        points += (grid := _grid(asked, question.load, limit, places))
        verdicts.append(_unless_more_finishes_less(question, _verdict(question, asked, limit, places), grid))
    verdicts.sort(key=partial(_order, question))
    while question.requests_per_s is not None and (best := verdicts[0].best) and not verdicts[0].is_simulated:
        verdicts[0] = _simulated(question, verdicts[0], best)
        if verdicts[0].best is None or verdicts[0].best.layout != best.layout:
            verdicts.sort(key=partial(_order, question))
    points += [v.best for v in verdicts if v.best is not None]
    best = verdicts[0].best if verdicts else None
    return ServingSearch(best=best, verdicts=verdicts, front=pareto(points), num_points=len(points))


def _order(question: ServingQuestion, verdict: LayoutVerdict) -> tuple[float, float]:
    """Ascending: most throughput, or with a rate to serve the fewest devices and then the shorter ITL."""
    if (point := verdict.best) is None:
        return inf, inf
    if question.requests_per_s is None:
        return -point.output_tokens_per_s, 0.0
    return point.layout.num_devices, point.itl_s


def _candidates(question: ServingQuestion) -> Iterator[tuple[ServingLayout, int]]:
    layouts = list(legal_layouts(question.model, question.cluster))
    if not layouts:
        raise InfeasibleError(f"no layout of {question.cluster.name} can split {question.model.name}")
    for layout in layouts[:MAX_LAYOUTS]:
        yield layout, 0
        if question.disaggregated and layout.replicas > 1:
            shares = {max(1, min(round(layout.replicas * s / 8), layout.replicas - 1)) for s in range(1, 8)}
            yield from ((layout, prefill) for prefill in sorted(shares))


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
            if question.requests_per_s is None:
                best, why = _most_in_flight(question, asked, batch, limit, places)
            else:
                best, why = _fewest_replicas(question, asked, batch)
            stopped_by = why if best is not None else stopped_by or why
        if best is not None:
            break
    if not stopped_by:
        stopped_by = _broken(question, _at(asked, replace(question.load, concurrency=1.0)))
    return LayoutVerdict(
        layout=asked.of.layout, prefill_replicas=asked.prefill_replicas, best=best, stopped_by=stopped_by
    )


def _unless_more_finishes_less(
    question: ServingQuestion, verdict: LayoutVerdict, grid: Sequence[LayoutPoint]
) -> LayoutVerdict:
    """The verdict, or the point of fewer requests that has a higher rate.

    Prompts hide behind the weights that a step reads, until the tokens that it decodes hide behind them as well.
    """
    if verdict.best is None or verdict.prefill_replicas or question.requests_per_s is not None:
        return verdict
    best = max(
        (point for point in grid if point.keeps(question.bounds)),
        key=lambda point: point.output_tokens_per_s,
        default=verdict.best,
    )
    if best.output_tokens_per_s <= verdict.best.output_tokens_per_s:
        return verdict
    return replace(verdict, best=best, stopped_by="more in flight finish fewer")


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
        stopped_by = _broken(question, point)
    return None, stopped_by


def _fewest_replicas(question: ServingQuestion, asked: Server, batch: float) -> tuple[LayoutPoint | None, str]:
    """The point of the fewest replicas that finish what arrives within the bounds. Replicas that prefill stay.

    Replicas that would also drain a queue come first.
    """
    layout, rate = asked.of.layout, question.requests_per_s
    assert rate is not None
    most = float(np.squeeze(states(asked, question.load, batch).output_tokens_per_s)) / question.load.output_tokens
    fewest = (
        layout.replicas if asked.prefill_replicas else max(math.ceil(rate / most * layout.replicas * (1 - 1e-9)), 1)
    )
    undrained = None
    for replicas in range(fewest, layout.replicas + 1):
        fewer = question.server(replace(layout, replicas=replicas), asked.prefill_replicas)
        try:
            point = _at(fewer, rate_load(fewer, question.load, rate))
        except InfeasibleError:
            continue
        if not point.keeps(question.bounds):
            continue
        if rate < capacity_per_s(fewer, question.load):
            return point, "rate is met by a closed loop"
        undrained = undrained or point
    if undrained is not None and question.bounds.percentile is None:
        return undrained, UNDRAINED
    return None, f"{most:,.3g} requests/s at most" + ("" if question.bounds.is_empty else " within the bounds")


def _simulated(question: ServingQuestion, verdict: LayoutVerdict, best: LayoutPoint) -> LayoutVerdict:
    """The verdict with the latencies of the arrivals, and as many more replicas as keep their bounds."""
    if verdict.stopped_by == UNDRAINED:
        return replace(verdict, is_simulated=True)
    load, rate = question.load, question.requests_per_s or 0.0
    best = replace(best, requests_per_s=rate, output_tokens_per_s=rate * load.output_tokens)
    arrivals = arrivals_named(question.arrivals, rate)

    def kept(replicas: int) -> LayoutPoint | None:
        layout = replace(best.layout, replicas=replicas)
        asked = question.server(layout, best.prefill_replicas)
        found = simulate(asked, load, arrivals, seed=question.seed, requests=FEW_REQUESTS)
        if found is None or not found.keeps(question.bounds):
            return None
        ttft_s, itl_s, request_s = found.means
        return replace(best, layout=layout, concurrency=rate * request_s, ttft_s=ttft_s, itl_s=itl_s)

    rest = range(best.layout.replicas, verdict.layout.replicas + 1)
    if (point := kept(rest[0])) is None and len(rest) > 1 and kept(rest[-1]):
        point = kept(rest[bisect_left(rest, True, 1, len(rest) - 1, key=lambda replicas: kept(replicas) is not None)])
    whose = "the mean" if (percentile := question.bounds.percentile) is None else f"p{percentile:g}"
    why = "rate is met" if point is not None else f"{whose} of {question.arrivals} arrivals breaks a bound"
    return replace(verdict, best=point, stopped_by=why, is_simulated=True)


FEW_REQUESTS = 1_000  # with which replicas are counted, before as many as an answer has keep the bounds
UNDRAINED = "rate is met while no queue forms"
BOUND_BY = {
    "kv_cache": "KV cache is full", "engine": "sequences of the engine", "prefill": "replicas that prefill",
    "prompts": "every step is full of prompts",
}  # fmt: skip


def _broken(question: ServingQuestion, point: LayoutPoint) -> str:
    """The bound that a point breaks."""
    bounds = question.bounds
    name, value, limit = (
        ("ITL", point.itl_s, bounds.itl_s) if point.itl_s > bounds.itl_s else ("TTFT", point.ttft_s, bounds.ttft_s)
    )
    return f"{name} {value * 1e3:,.2f} ms at {point.concurrency:,.0f} in flight, bound {limit * 1e3:,.6g} ms"


def pareto(points: Sequence[LayoutPoint]) -> list[LayoutPoint]:
    """Points that no other point beats in throughput per device and interactivity, by rising interactivity."""
    front: list[LayoutPoint] = []
    for point in sorted(points, key=lambda p: (-p.interactivity, -p.tokens_per_s_per_device)):
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device * (1 + 1e-9):
            front.append(point)
    return front[::-1]


def answer_of(
    question: ServingQuestion, found: ServingSearch
) -> tuple[ServingSearch, LoadEstimate, ArrivalEstimate | None]:
    """The search with its best point under all arrivals, that point's estimate, and its latencies; None without a rate.

    Where more arrivals break a bound than the search looked at, it gets a replica more.
    """
    first, load, rate = found.verdicts[0], question.load, question.requests_per_s
    point = first.best
    assert point is not None
    if rate is None:
        asked = question.server(point.layout, point.prefill_replicas)
        return found, estimate_load(asked, replace(load, concurrency=point.concurrency)), None
    replicas = point.layout.replicas
    while True:
        asked = question.server(replace(point.layout, replicas=replicas), point.prefill_replicas)
        under = estimate_arrivals(asked, load, question.arrivals, rate, bounds=question.bounds, seed=question.seed)
        if replicas == first.layout.replicas or not under.simulated or under.simulated.keeps(question.bounds):
            break
        replicas += 1
    estimate = estimate_rate(asked, load, rate, under.simulated)
    times = {"ttft_s": estimate.ttft.value, "itl_s": estimate.itl.value}
    point = replace(point, layout=asked.of.layout, concurrency=estimate.in_flight, **times)
    return replace(found, best=point, verdicts=[replace(first, best=point), *found.verdicts[1:]]), estimate, under
