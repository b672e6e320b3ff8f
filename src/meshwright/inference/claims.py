"""Published claims about inference, capacity and prices, computed.

`catalog/data/claims_answers.toml` says which claim is read as what, and what had to be assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, hypot, log

import numpy as np

from meshwright.catalog import lookup as catalog
from meshwright.catalog.claim_answers import ClaimAnswer, ClaimQuantity, claim_answer
from meshwright.catalog.lookup import Claim
from meshwright.catalog.prices import licences, prices
from meshwright.inference.capacity import CapacityQuestion, capacities, max_parameters, shipped_reserve
from meshwright.inference.estimate import LoadEstimate, estimate_load
from meshwright.inference.formats import cache_format, weight_format
from meshwright.inference.ingestion_claim import predict_index_build
from meshwright.inference.layout import ServingLayout
from meshwright.inference.points import Quantity, engines, read_points, shipped_points_path
from meshwright.inference.server import Server, server
from meshwright.inference.serving import RequestLoad
from meshwright.inference.work import Served
from meshwright.planner.claims import ClaimPrediction
from meshwright.specs.estimate import Estimate, Tier

OFFLINE_LENGTHS = (
    (128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000), (1024, 2048), (2048, 128),
    (2048, 2048), (5000, 500), (20000, 2000),
)  # fmt: skip
"""Prompt and answer tokens of the eleven configurations that NVIDIA published for Llama 3.1 405B in FP4."""

ONLINE = (1024, 1024)
"""Prompt and answer tokens of online serving, which the document does not state. Assumed."""

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
"""Loads of the document's procedure."""

ITL_BOUND_S = 0.030


def predict_serving_claim(found: Claim) -> ClaimPrediction | None:
    """The prediction of a claim about inference, capacity, ingestion or price; None for any other."""
    answer = claim_answer(found)
    if answer.reads is ClaimQuantity.PRICE:
        return _price(found, answer)
    if answer.reads is ClaimQuantity.SERVING:
        return _READERS[answer.value](found)
    return None


# --- systems ---


def _served(model: str, cluster: str, layout: ServingLayout) -> Served:
    place = catalog.cluster(cluster)
    return Served(
        model=catalog.model(model), cluster=place, weights=weight_format("fp4", place.accelerator),
        cache=cache_format("fp8", place.accelerator), layout=layout,
    )  # fmt: skip


def offline_server(accelerator: str, layout: ServingLayout) -> Server:
    """Llama 3.1 405B in FP4 on a node of 8, with the engine of the document."""
    engine = "vllm" if accelerator == "mi355x" else "trtllm"
    return server(_served("llama3.1-405b", f"{accelerator}-8x1", layout), engines()[engine])


def offline_rates(asked: Server) -> list[LoadEstimate]:
    """Estimates of the eleven configurations with as many requests as fit."""
    return [estimate_load(asked, RequestLoad(input_tokens=i, output_tokens=o)) for i, o in OFFLINE_LENGTHS]


def geomean_ratio(one: list[LoadEstimate], other: list[LoadEstimate]) -> Estimate:
    """Geometric mean of the ratios of output rates. Errors of one system are common to all of its rows."""
    logs = [log(a.output_tokens_per_s.value / b.output_tokens_per_s.value) for a, b in zip(one, other, strict=True)]
    value = exp(float(np.mean(logs)))
    spread = exp(hypot(_log_spread(one), _log_spread(other)))
    return Estimate(value=value, low=value / spread, high=value * spread, unit="x", tier=Tier.DATASHEET)


def _log_spread(found: list[LoadEstimate]) -> float:
    return float(np.median([log(e.output_tokens_per_s.high / e.output_tokens_per_s.value) for e in found]))


@cache
def published_replica_ratios() -> dict[str, float]:
    """Geometric mean of 2 x TP4 over TP8 of 405B on B200, by source pair: parallelism without a change of hardware.

    The second replica is extrapolated: the tables have one.
    """
    rates: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for point in read_points(shipped_points_path()):
        c = point.conditions
        if c is None or c.quantity is not Quantity.OUTPUT_RATE or c.served.model.name != "llama3.1-405b":
            continue
        if c.served.cluster.accelerator.name == "b200":
            key = (point.source, c.served.layout.describe())
            rates.setdefault(key, {})[c.load.input_tokens, c.load.output_tokens] = c.measured
    found = {}
    base = next(source for source, layout in rates if "v0.19" in source and layout == "TP8")
    for source, layout in rates:
        if layout == "TP4":
            whole = rates.get((source, "TP8")) or rates[base, "TP8"]
            four = rates[source, "TP4"]
            ratios = [2 * four[key] / whole[key] for key in four if key in whole]
            found[source] = exp(float(np.mean(np.log(ratios))))
    return found


# --- claims ---


def _offline_ratio(found: Claim) -> ClaimPrediction:
    one, eight = ServingLayout(replicas=8), ServingLayout(tensor=8)
    replicas, split = (offline_rates(offline_server("mi355x", layout)) for layout in (one, eight))
    other = offline_rates(offline_server("b200", eight))
    parallelism, hardware = geomean_ratio(replicas, split), geomean_ratio(split, other)
    published = ", ".join(f"{ratio:.2f}" for ratio in sorted(published_replica_ratios().values()))
    return ClaimPrediction(
        claim=found,
        value=geomean_ratio(replicas, other),
        plans=(
            "mi355x-8x1: 8 x TP1, vllm",
            "b200-8x1: TP8, trtllm",
            f"of which replicas over TP8, both on mi355x: {parallelism.value:.2f}",
            f"of which mi355x over b200, both TP8: {hardware.value:.2f} ({hardware.low:.2f} to {hardware.high:.2f})",
            f"published tables of b200, 2 x TP4 (extrapolated) over TP8: {published}",
        ),
    )


def _online(accelerator: str, concurrency: int) -> LoadEstimate:
    engine = "sglang" if accelerator == "mi355x" else "trtllm"
    of = _served("deepseek-v3", f"{accelerator}-8x1", ServingLayout(tensor=8))
    load = RequestLoad(input_tokens=ONLINE[0], output_tokens=ONLINE[1], concurrency=concurrency)
    return estimate_load(server(of, engines()[engine]), load)


def _online_ratio(found: Claim) -> ClaimPrediction:
    one, other = [_online("mi355x", 16)], [_online("b200", 16)]
    plans = ("mi355x-8x1: TP8, sglang, 16 in flight", "b200-8x1: TP8, trtllm, 16 in flight")
    return ClaimPrediction(claim=found, value=geomean_ratio(one, other), plans=plans)


def _sessions_under_itl(found: Claim) -> ClaimPrediction:
    """Largest of the procedure's loads whose ITL is below the bound; the interval reads the ends of the ITL's."""
    loads = [(n, _online("mi355x", n)) for n in CONCURRENCIES]
    value, low, high = (
        max((n for n, e in loads if getattr(e.itl, end) < ITL_BOUND_S), default=0) for end in ("value", "high", "low")
    )
    other = max((n for n in CONCURRENCIES if _online("b200", n).itl.value < ITL_BOUND_S), default=0)
    estimate = Estimate(value=value, low=low, high=high, unit="sessions", tier=Tier.DATASHEET)
    return ClaimPrediction(claim=found, value=estimate, plans=(f"b200-8x1: TP8, trtllm: {other} sessions",))


def _question(model: str, precision: str, kv: str, context: int) -> CapacityQuestion:
    place = catalog.cluster("mi355x-1x1")
    return CapacityQuestion(
        model=catalog.model(model), cluster=place, weights=weight_format(precision, place.accelerator),
        cache=cache_format(kv, place.accelerator), context=context, reserve=shipped_reserve(),
    )  # fmt: skip


def _holds(found: Claim) -> ClaimPrediction:
    best = capacities(_question("llama3.1-405b", "fp4", "fp8", 8192))[0]
    return ClaimPrediction(claim=found, value=_exact(float(best.fits), found.unit), plans=(best.layout.describe(),))


def _parameters(found: Claim) -> ClaimPrediction:
    largest = max_parameters(_question("llama3.1-405b", "fp4", "fp8", 8192))
    return ClaimPrediction(claim=found, value=_exact(largest, found.unit))


def _sessions(found: Claim) -> ClaimPrediction:
    best = capacities(_question("llama3.1-70b", "bf16", "bf16", 131_072))[0]
    return ClaimPrediction(claim=found, value=_exact(float(best.max_sessions), found.unit))


def _licence(found: Claim) -> ClaimPrediction:
    known = [licence.usd_per_device_year for licence in licences() if licence.name == "NVIDIA AI Enterprise"]
    value = Estimate(value=known[0], low=min(known), high=max(known), unit=found.unit, tier=Tier.DATASHEET)
    return ClaimPrediction(claim=found, value=value)


def _price(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    """Price of a node in a region, from the catalogue's price of a device."""
    accelerator = found.accelerator.lower()
    price = next(p for p in prices() if (p.accelerator, p.region) == (accelerator, answer.value))
    usd = price.usd_per_device_hour * (found.num_accelerators or 1)
    return ClaimPrediction(claim=found, value=_exact(usd, found.unit))


def _exact(value: float, unit: str) -> Estimate:
    return Estimate(value=value, low=value, high=value, unit=unit, tier=Tier.DATASHEET)


_READERS: dict[str, Callable[[Claim], ClaimPrediction]] = {
    "offline-ratio": _offline_ratio, "online-ratio": _online_ratio, "sessions-under-itl": _sessions_under_itl,
    "holds": _holds, "parameters": _parameters, "sessions": _sessions, "licence": _licence,
    "index-build": predict_index_build,
}  # fmt: skip
