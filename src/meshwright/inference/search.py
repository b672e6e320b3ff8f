"""Search of serving layouts: most tokens/s under bounds of TTFT and ITL, and the front of throughput and interactivity.

Every legal layout of the cluster is costed with powers of two of requests in flight per replica, up to what its memory
holds. Between two of which one keeps the bounds and the other does not, bisection finds the largest number that does.
The best point has most output tokens/s. Without a rate to serve, all devices are used, so price and energy per token
rank as throughput does. With a rate, the fewest replicas that keep it and the bounds are taken of each layout, with
the requests in flight that `inference estimate` has at this rate, and the layout with fewest devices, which is the
cheapest, wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf

import numpy as np

from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.capacity import Reserve
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.estimate import LoadEstimate, Server, concurrency_at, estimate_load, state
from meshwright.inference.formats import StorageFormat
from meshwright.inference.layout import ServingLayout, legal_layouts
from meshwright.inference.predict import rates_for
from meshwright.inference.rates import ServingRates
from meshwright.inference.serving import EngineTraits, RequestLoad
from meshwright.inference.work import Served
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model

LARGEST_BATCH = 2**20
MAX_LAYOUTS = 400
FRONT_GAIN = 0.005
"""Least gain in throughput of the next point of the front."""


@dataclass(frozen=True, kw_only=True)
class LatencyLimits:
    """Upper bounds in seconds; infinity: none."""

    ttft_s: float = inf
    itl_s: float = inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is no bound", got=getattr(self, name), allowed="above 0")


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
    disaggregated: bool = False  # also try replicas that only prefill
    reserve: Reserve
    calibration: ServingCalibration = field(default_factory=shipped_constants)


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
    verdicts, points = [], []
    rates: ServingRates | None = None
    for layout, prefill in _candidates(question):
        asked = _server(question, layout, prefill)
        rates = rates_for(asked.of, question.engine, asked.calibration) if rates is None else rates
        found = list(_points(question, asked, rates))
        points += [point for point in found if isinstance(point, LayoutPoint)]
        verdicts.append(_verdict(question, layout, prefill, found))
    verdicts.sort(key=lambda v: -inf if v.best is None else _rank(question, v.best), reverse=True)
    best = verdicts[0].best if verdicts else None
    return ServingSearch(best=best, verdicts=verdicts, front=pareto(points), num_points=len(points))


def _rank(question: ServingQuestion, point: LayoutPoint) -> float:
    """Larger is better: throughput, or with a rate to serve the fewest devices and then the shorter ITL."""
    if question.requests_per_s is None:
        return point.output_tokens_per_s
    return -point.layout.num_devices - point.itl_s / (1 + point.itl_s)


def _candidates(question: ServingQuestion) -> Iterator[tuple[ServingLayout, int]]:
    layouts = list(legal_layouts(question.model, question.cluster))
    if not layouts:
        raise InfeasibleError(f"no layout of {question.cluster.name} can split {question.model.name}")
    for layout in layouts[:MAX_LAYOUTS]:
        yield layout, 0
        if question.disaggregated and layout.replicas > 1:
            shares = {max(1, min(round(layout.replicas * s / 8), layout.replicas - 1)) for s in range(1, 8)}
            yield from ((layout, prefill) for prefill in sorted(shares))


def _server(question: ServingQuestion, layout: ServingLayout, prefill: int) -> Server:
    of = Served(
        model=question.model, cluster=question.cluster, weights=question.weights, cache=question.cache, layout=layout
    )
    return Server(
        of=of, engine=question.engine, reserve=question.reserve, calibration=question.calibration,
        prefill_replicas=prefill,
    )  # fmt: skip


def _points(question: ServingQuestion, asked: Server, rates: ServingRates) -> Iterator[LayoutPoint | str]:
    """Points of rising concurrency; a text where the layout cannot serve at all."""
    try:
        points = _by_load(question, asked, rates)
    except InfeasibleError as error:
        yield error.message
        return
    yield from points
    if question.requests_per_s is not None:
        yield from _at_rate(question, asked, rates, [p for p in points if p.keeps(question.bounds)])


def _by_load(question: ServingQuestion, asked: Server, rates: ServingRates) -> list[LayoutPoint]:
    decoding = asked.decoding.layout.replicas
    found: list[LayoutPoint] = []
    count = decoding
    while count <= LARGEST_BATCH * decoding:
        point = _point(asked, question.load, count, rates)
        if point.bound_by != "concurrency":
            most = max(int(state(asked, replace(question.load, concurrency=None), rates).in_flight), 1)
            found.append(_point(asked, question.load, most, rates))
            break
        found.append(point)
        count *= 2
    for kept, broken in pairwise(tuple(found)):
        if kept.keeps(question.bounds) and not broken.keeps(question.bounds):
            found += _last_kept(question, asked, rates, kept, broken)
    return sorted(found, key=lambda p: p.concurrency)


def _last_kept(
    question: ServingQuestion, asked: Server, rates: ServingRates, kept: LayoutPoint, broken: LayoutPoint
) -> Sequence[LayoutPoint]:
    """Neighbours in load of which the first keeps the bounds and the second does not: latencies rise with the load."""
    while broken.concurrency - kept.concurrency > 1:
        middle = _point(asked, question.load, int(kept.concurrency + broken.concurrency) // 2, rates)
        kept, broken = (middle, broken) if middle.keeps(question.bounds) else (kept, middle)
    return kept, broken


def _at_rate(
    question: ServingQuestion, asked: Server, rates: ServingRates, kept: Sequence[LayoutPoint]
) -> Iterator[LayoutPoint]:
    """The fewest replicas that keep rate and bounds, at the load of this rate."""
    assert question.requests_per_s is not None
    most = max((p.requests_per_s for p in kept), default=0.0)
    replicas = asked.of.layout.replicas
    if not most or most < question.requests_per_s:
        return
    fewest = replicas if asked.prefill_replicas else ceil(question.requests_per_s / (most / replicas) - 1e-9)
    for count in range(fewest, replicas + 1):
        layout = replace(asked.of.layout, replicas=count)
        server = replace(asked, of=replace(asked.of, layout=layout))
        with suppress(InfeasibleError):
            concurrency = concurrency_at(server, question.load, question.requests_per_s, rates)
            point = _point(server, question.load, concurrency, rates)
            if point.keeps(question.bounds):
                yield point
                return


def _point(asked: Server, load: RequestLoad, concurrency: float, rates: ServingRates) -> LayoutPoint:
    found = state(asked, replace(load, concurrency=float(concurrency)), rates)
    ttft, itl, rate = (
        float(np.squeeze(v)) for v in (found.steady.ttft_s, found.steady.itl_s, found.steady.output_tokens_per_s)
    )
    return LayoutPoint(
        layout=asked.of.layout, prefill_replicas=asked.prefill_replicas, concurrency=float(concurrency),
        bound_by=found.limit.binds, ttft_s=ttft, itl_s=itl, output_tokens_per_s=rate,
        requests_per_s=rate / load.output_tokens,
    )  # fmt: skip


def _verdict(
    question: ServingQuestion, layout: ServingLayout, prefill: int, found: Sequence[LayoutPoint | str]
) -> LayoutVerdict:
    points = [point for point in found if isinstance(point, LayoutPoint)]
    kept = [p for p in points if p.keeps(question.bounds) and _serves(question, p)]
    best = max(kept, key=lambda p: _rank(question, p), default=None)
    return LayoutVerdict(
        layout=layout, prefill_replicas=prefill, best=best, stopped_by=_stopped(question, found, points, best)
    )


def _serves(question: ServingQuestion, point: LayoutPoint) -> bool:
    """With a rate, a point of this very rate: others are of another load."""
    return question.requests_per_s is None or abs(point.requests_per_s / question.requests_per_s - 1) < 1e-6


def _stopped(
    question: ServingQuestion,
    found: Sequence[LayoutPoint | str],
    points: Sequence[LayoutPoint],
    best: LayoutPoint | None,
) -> str:
    if not points:
        return str(found[0]) if found else "no load"
    after = next((p for p in points if not p.keeps(question.bounds)), None)
    if after is not None and (best is None or question.requests_per_s is None):
        broken = "ITL" if after.itl_s > question.bounds.itl_s else "TTFT"
        value, limit = (
            (after.itl_s, question.bounds.itl_s) if broken == "ITL" else (after.ttft_s, question.bounds.ttft_s)
        )
        return f"{broken} {value * 1e3:,.4g} ms at {after.concurrency:,.0f} in flight, bound {limit * 1e3:,.4g} ms"
    if best is None:
        return f"{max(p.requests_per_s for p in points):,.3g} requests/s at most"
    return {"kv_cache": "KV cache is full", "engine": "sequences of the engine"}.get(points[-1].bound_by, "rate is met")


def pareto(points: Sequence[LayoutPoint]) -> list[LayoutPoint]:
    """Points that no other point beats in throughput per device and interactivity, by rising interactivity.

    Of neighbours in load, which hardly differ, the more interactive one stands for both.
    """
    front: list[LayoutPoint] = []
    for point in sorted(points, key=lambda p: (-p.interactivity, -p.tokens_per_s_per_device)):
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device * (1 + FRONT_GAIN):
            front.append(point)
    return front[::-1]


def estimate_point(question: ServingQuestion, point: LayoutPoint) -> LoadEstimate:
    """The point's estimate with intervals."""
    asked = _server(question, point.layout, point.prefill_replicas)
    return estimate_load(asked, replace(question.load, concurrency=point.concurrency))
