"""Estimates of a server under several loads: latencies and rates with intervals, memory, price and energy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.arrays import scalar
from meshwright.inference.arrivals import Simulated
from meshwright.inference.capacity import CapacityQuestion, DeviceMemory, device_memory
from meshwright.inference.points import PointConditions, Quantity
from meshwright.inference.predict import predict_points
from meshwright.inference.server import Server, full, rate_load, state
from meshwright.inference.serving import BatchLimit, RequestLoad, Steady
from meshwright.inference.work import Served
from meshwright.specs.estimate import Estimate, Tier


@dataclass(frozen=True, kw_only=True)
class LoadEstimate:
    """Latencies and rates under one load. Rates are of all devices; energy and price are `inference.price`'s."""

    load: RequestLoad
    limit: BatchLimit
    in_flight: float  # requests on all replicas together; those that wait for memory are not counted
    most_in_flight: float  # requests that fit at once, on all replicas together
    request_s: float  # from a place in memory to the last token; of a simulated rate from the arrival
    ttft: Estimate  # s
    itl: Estimate  # s: (end-to-end - TTFT) / (output tokens - 1), mean over a request (TPOT)
    output_tokens_per_s: Estimate
    total_tokens_per_s: Estimate  # prompts included
    num_devices: int
    step_components_s: dict[str, float]  # of one decode step
    prompt_components_s: dict[str, float]  # that one prompt adds
    prefill_share: float  # of device time
    memory: DeviceMemory

    @property
    def requests_per_s(self) -> float:
        """Finished requests of all replicas."""
        return self.output_tokens_per_s.value / self.load.output_tokens

    @property
    def waiting(self) -> float:
        """Requests that are asked for and wait for a place, on all replicas together."""
        asked, most = self.load.concurrency or 0.0, self.most_in_flight
        return asked - most if asked > most * (1 + 1e-9) else 0.0

    @property
    def interactivity(self) -> float:
        """Output tokens/s that one user sees."""
        return 1 / self.itl.value if self.itl.value else float("inf")

    def as_json(self) -> dict[str, Any]:
        out, load = self.output_tokens_per_s, self.load
        scale = load.input_tokens / load.output_tokens
        return {
            "input_tokens": load.input_tokens, "output_tokens": load.output_tokens, "concurrency": load.concurrency,
            "input_spread": load.input_spread, "output_spread": load.output_spread,
            "prefix_hit_rate": load.prefix_hit_rate, "cached_tokens": load.input_tokens - load.computed_tokens,
            "in_flight": self.in_flight, "most_in_flight": self.most_in_flight,
            "batch_per_replica": self.limit.sequences, "bound_by": self.limit.binds,
            "ttft_s": self.ttft, "itl_s": self.itl, "output_tokens_per_s": out,
            "input_tokens_per_s": out.value * scale, "total_tokens_per_s": self.total_tokens_per_s,
            "output_tokens_per_s_per_device": out.value / self.num_devices,
            "output_tokens_per_s_per_user": self.interactivity, "requests_per_s": self.requests_per_s,
            "step_components_s": self.step_components_s, "prompt_components_s": self.prompt_components_s,
            "prefill_share": self.prefill_share, "device_memory": self.memory.as_json(),
        }  # fmt: skip


def estimate_load(asked: Server, load: RequestLoad) -> LoadEstimate:
    """Latencies and rates under a closed loop (`load.concurrency`), or with as many requests as fit.

    Raises InfeasibleError where not one request fits in memory.
    """
    limit, found = state(asked, load)
    return _estimate(asked, load, limit, found, _spreads(asked, asked.decoding, load, limit))


def estimate_rate(
    asked: Server, load: RequestLoad, requests_per_s: float, simulated: Simulated | None = None
) -> LoadEstimate:
    """Latencies at an arrival rate of `requests_per_s`: the means of its simulation, with as many in flight.

    Without one, those of the closed loop that finishes the rate, in which a request finds one fewer than are in flight.
    Raises InfeasibleError where the server cannot keep up.
    """
    if simulated is None:
        return estimate_load(asked, rate_load(asked, load, requests_per_s))
    ttft_s, itl_s, request_s = simulated.means
    in_flight, tokens = requests_per_s * request_s, requests_per_s * load.output_tokens
    found = estimate_load(asked, replace(load, concurrency=in_flight))
    return replace(
        found, in_flight=in_flight, request_s=request_s,
        ttft=_moved(found.ttft, ttft_s), itl=_moved(found.itl, itl_s),
        output_tokens_per_s=_moved(found.output_tokens_per_s, tokens),
        total_tokens_per_s=_moved(found.total_tokens_per_s, tokens + requests_per_s * load.input_tokens),
    )  # fmt: skip


def _moved(found: Estimate, value: float) -> Estimate:
    """The estimate with another value and the same interval about it, as a factor."""
    factor = value / found.value if found.value else 1.0
    return replace(found, value=value, low=found.low * factor, high=found.high * factor)


def _spreads(asked: Server, of: Served, load: RequestLoad, limit: BatchLimit) -> dict[Quantity, float]:
    """Factor between each quantity and the ends of its interval."""
    conditions = [
        PointConditions(served=of, load=load, engine=asked.engine, limit=limit, quantity=q, measured=float("nan"))
        for q in (Quantity.TTFT, Quantity.ITL, Quantity.OUTPUT_RATE)
        if load.output_tokens > 1 or q is not Quantity.ITL
    ]
    found = predict_points(conditions, asked.calibration)
    return {c.quantity: float(h / v) for c, v, h in zip(conditions, found.value, found.high, strict=True)}


def _estimate(
    asked: Server, load: RequestLoad, limit: BatchLimit, found: Steady, spread: dict[Quantity, float]
) -> LoadEstimate:
    prompt, step = _components(found.prompt), _components(found.step)
    decode_s = sum(step.values()) * (load.output_tokens - 1) / (1 + load.accepted_per_step)
    prefill_s, layout = sum(prompt.values()) * float(limit.sequences), asked.of.layout
    split = asked.prefill_replicas / layout.replicas
    question = CapacityQuestion(
        model=asked.of.model, cluster=asked.of.cluster, weights=asked.of.weights, cache=asked.of.cache,
        context=load.input_tokens + load.output_tokens, reserve=asked.reserve,
    )  # fmt: skip
    rate = spread[Quantity.OUTPUT_RATE]
    return LoadEstimate(
        load=load, limit=limit, in_flight=float(found.in_flight), most_in_flight=full(asked, load)[1],
        request_s=scalar(found.request_s),
        ttft=_interval(found.ttft_s, spread[Quantity.TTFT], "s"),
        itl=_interval(found.itl_s, spread.get(Quantity.ITL, 1.0), "s"),
        output_tokens_per_s=_interval(found.output_tokens_per_s, rate, "tokens/s"),
        total_tokens_per_s=_interval(found.total_tokens_per_s, rate, "tokens/s"),
        num_devices=layout.num_devices, step_components_s=step, prompt_components_s=prompt,
        prefill_share=split or prefill_s / (prefill_s + decode_s), memory=device_memory(question, layout),
    )  # fmt: skip


def _components(seconds: Any) -> dict[str, float]:
    names = ("linear", "attention", "elementwise", "communication", "launches", "host")
    return {name: scalar(getattr(seconds, name)) for name in names}


def _interval(value: Any, spread: float, unit: str) -> Estimate:
    found = scalar(value)
    return Estimate(value=found, low=found / spread, high=found * spread, unit=unit, tier=Tier.DATASHEET)
