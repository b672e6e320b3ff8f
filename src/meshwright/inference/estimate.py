"""Estimates of a server under several loads: latencies and rates with intervals, memory, price and energy.

Open loop: at an arrival rate λ below saturation the requests in flight are those of Little's law, B = λ x time of a
request, found by bisection. Disaggregated: some replicas only prefill and send the cache of a prompt to those that only
decode; a prompt then never delays a decode step, and the slower pool bounds the rate. N requests in flight finish at
the rate X = N / (time of a request that nobody delays), or at the slower pool's; what is left of N / X is the wait for
a place, before the first token. X x time of decoding are in the decode pool, which holds as many as its memory does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.capacity import CapacityQuestion, DeviceMemory, Reserve, device_memory, shipped_reserve
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.layout import check_layout
from meshwright.inference.memory import session_bytes
from meshwright.inference.points import PointConditions, Quantity
from meshwright.inference.predict import predict_points, rates_for
from meshwright.inference.rates import ServingRates
from meshwright.inference.serving import (
    BatchLimit,
    EngineTraits,
    RequestLoad,
    Steady,
    batch_limit,
    request_work,
    steady,
)
from meshwright.inference.work import Served
from meshwright.specs.estimate import Estimate, Tier

SATURATED = 0.98
"""Share of the largest request rate above which an open loop has no steady state in practice."""

ITERATIONS = 60


@dataclass(frozen=True, kw_only=True)
class Server:
    """A model in its formats on a layout, run by an engine."""

    of: Served
    engine: EngineTraits
    reserve: Reserve
    calibration: ServingCalibration
    prefill_replicas: int = 0  # replicas that only prefill; 0: every replica does both

    def __post_init__(self) -> None:
        check_layout(self.of.layout, self.of.model, self.of.cluster)
        if not 0 <= self.prefill_replicas < self.of.layout.replicas:
            raise InputError(
                "replicas that only prefill are out of range", got=self.prefill_replicas,
                allowed=f"0 to {self.of.layout.replicas - 1}, below the replicas",
            )  # fmt: skip

    @property
    def rates(self) -> ServingRates:
        """Fitted rates of this system."""
        return rates_for(self.of, self.engine, self.calibration)

    @property
    def decoding(self) -> Served:
        """The replicas that decode."""
        layout = self.of.layout
        return replace(self.of, layout=replace(layout, replicas=layout.replicas - self.prefill_replicas))


def server(of: Served, engine: EngineTraits, *, reserve: Reserve | None = None, prefill_replicas: int = 0) -> Server:
    """A server with the shipped constants."""
    return Server(
        of=of,
        engine=engine,
        reserve=reserve or shipped_reserve(),
        calibration=shipped_constants(),
        prefill_replicas=prefill_replicas,
    )


@dataclass(frozen=True, kw_only=True)
class LoadEstimate:
    """Latencies and rates under one load. Rates are of all devices; energy and price are `inference.price`'s."""

    load: RequestLoad
    limit: BatchLimit
    in_flight: float  # requests on all replicas together
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
    def interactivity(self) -> float:
        """Output tokens/s that one user sees."""
        return 1 / self.itl.value if self.itl.value else float("inf")

    def as_json(self) -> dict[str, Any]:
        out, load = self.output_tokens_per_s, self.load
        scale = load.input_tokens / load.output_tokens
        return {
            "input_tokens": load.input_tokens, "output_tokens": load.output_tokens, "concurrency": load.concurrency,
            "in_flight": self.in_flight, "batch_per_replica": self.limit.sequences, "bound_by": self.limit.binds,
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
    found = state(asked, load, asked.rates)
    spread = _spreads(asked, asked.decoding, load, found.limit)
    return _estimate(asked, load, found, spread)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """A steady state, what limits it, and the requests in flight on all replicas: those that run, or, disaggregated,
    those that wait for a place too."""

    limit: BatchLimit
    steady: Steady
    in_flight: float
    input_tokens: int

    @property
    def requests_per_s(self) -> float:
        return float(_scalar(self.steady.total_tokens_per_s - self.steady.output_tokens_per_s)) / self.input_tokens


def state(asked: Server, load: RequestLoad, rates: ServingRates) -> ServerState:
    """The steady state of a closed loop, or with as many requests as fit. Raises InfeasibleError where not one fits."""
    if asked.prefill_replicas:
        return _disaggregated(asked, load, rates)
    of = asked.decoding
    limit = batch_limit(of, load, asked.engine, asked.reserve)
    found = steady(request_work(of, load, asked.engine, limit), rates)
    return ServerState(
        limit=limit, steady=found, in_flight=limit.sequences * of.layout.replicas, input_tokens=load.input_tokens
    )


def _disaggregated(asked: Server, load: RequestLoad, rates: ServingRates) -> ServerState:
    """Decode steps without prompts, at the rate that prefill replicas and decode replicas both reach."""
    of, replicas = asked.decoding, asked.decoding.layout.replicas
    most = batch_limit(of, replace(load, concurrency=None), asked.engine, asked.reserve)
    steps = (load.output_tokens - 1) / (1 + load.accepted_per_step)

    def decoding(count: float) -> Steady:
        """The state with `count` requests in the decode pool."""
        limit = BatchLimit(sequences=count / replicas, binds="concurrency")
        return steady(request_work(of, replace(load, concurrency=count), asked.engine, limit), rates)

    def decode_s(found: Steady) -> float:
        return steps * float(_scalar(found.step.total))

    def unhindered_s(found: Steady) -> float:
        """Time to the first token of a request that waits for nobody."""
        prompt_s = of.layout.attention_data * float(_scalar(found.prompt.total))
        half_s = float(_scalar(found.step.total)) / 2
        return float(_scalar(rates.request_s)) + prompt_s + transfer_s(asked.of, load.input_tokens) + half_s

    def finished(found: Steady) -> float:
        """Requests/s that prefill and, with these decode steps, the requests in flight allow."""
        prefilled = asked.prefill_replicas / float(_scalar(found.prompt.total))
        if load.concurrency is None:
            return prefilled
        return min(prefilled, load.concurrency / (unhindered_s(found) + decode_s(found)))

    full = most.sequences * replicas
    low, high = 0.0, full if load.concurrency is None else min(full, load.concurrency)
    found = decoding(high)
    binds = most.binds
    if finished(found) * decode_s(found) < high:  # the decode pool is not full
        for _ in range(ITERATIONS):
            middle = (low + high) / 2
            found = decoding(middle)
            low, high = (middle, high) if finished(found) * decode_s(found) > middle else (low, middle)
        is_waiting = load.concurrency is None or load.concurrency > finished(found) * (
            unhindered_s(found) + decode_s(found)
        ) * (1 + 1e-9)
        binds = "prefill" if is_waiting else "concurrency"
    spent_s = unhindered_s(found) + decode_s(found)
    rate = min(finished(found), high / max(decode_s(found), 1e-12))
    in_flight = rate * spent_s if load.concurrency is None else load.concurrency
    wait_s = max(in_flight / rate - spent_s, 0.0)
    tokens = rate * load.output_tokens
    return ServerState(
        limit=BatchLimit(sequences=high / replicas, binds=binds),
        steady=replace(
            found,
            request_s=spent_s + wait_s,
            itl_s=decode_s(found) / max(load.output_tokens - 1, 1),
            ttft_s=unhindered_s(found) + wait_s,
            output_tokens_per_s=tokens,
            total_tokens_per_s=tokens * (load.input_tokens + load.output_tokens) / load.output_tokens,
        ),
        in_flight=in_flight,
        input_tokens=load.input_tokens,
    )


def transfer_s(of: Served, input_tokens: int) -> float:
    """Seconds to send the cache of a prompt from a replica to another, every device its own part.

    Inside a scale-up domain over its links, else over the network.
    """
    cluster, layout = of.cluster, of.layout
    inside = layout.num_devices <= cluster.fabric.scale_up_domain
    rate = cluster.fabric.scale_up_peer_bytes_per_s if inside else cluster.fabric.scale_out_bytes_per_s
    if not rate:
        raise InfeasibleError(f"{cluster.name} has no link between replicas to send a cache over")
    return session_bytes(of.model, of.cache, input_tokens) / (rate * layout.replica_devices)


_QUANTITIES = (Quantity.TTFT, Quantity.ITL, Quantity.OUTPUT_RATE)


def _spreads(asked: Server, of: Served, load: RequestLoad, limit: BatchLimit) -> dict[Quantity, float]:
    """Factor between each quantity and the ends of its interval."""
    conditions = [
        PointConditions(served=of, load=load, engine=asked.engine, limit=limit, quantity=q, measured=float("nan"))
        for q in _QUANTITIES
        if load.output_tokens > 1 or q is not Quantity.ITL
    ]
    found = predict_points(conditions, asked.calibration)
    return {c.quantity: float(h / v) for c, v, h in zip(conditions, found.value, found.high, strict=True)}


def _estimate(asked: Server, load: RequestLoad, state: ServerState, spread: dict[Quantity, float]) -> LoadEstimate:
    found, limit = state.steady, state.limit
    prompt, step = _components(found.prompt), _components(found.step)
    decode_s = sum(step.values()) * (load.output_tokens - 1) / (1 + load.accepted_per_step)
    prefill_s = sum(prompt.values()) * limit.sequences
    question = CapacityQuestion(
        model=asked.of.model, cluster=asked.of.cluster, weights=asked.of.weights, cache=asked.of.cache,
        context=load.input_tokens + load.output_tokens, reserve=asked.reserve,
    )  # fmt: skip
    rate = spread[Quantity.OUTPUT_RATE]
    return LoadEstimate(
        load=load,
        limit=limit,
        in_flight=state.in_flight,
        ttft=_interval(found.ttft_s, spread[Quantity.TTFT], "s"),
        itl=_interval(found.itl_s, spread.get(Quantity.ITL, 1.0), "s"),
        output_tokens_per_s=_interval(found.output_tokens_per_s, rate, "tokens/s"),
        total_tokens_per_s=_interval(found.total_tokens_per_s, rate, "tokens/s"),
        num_devices=asked.of.layout.num_devices,
        step_components_s=step,
        prompt_components_s=prompt,
        prefill_share=prefill_s / (prefill_s + decode_s),
        memory=device_memory(question, asked.of.layout),
    )


def _components(seconds: Any) -> dict[str, float]:
    names = ("linear", "attention", "elementwise", "communication", "launches", "host")
    return {name: float(_scalar(getattr(seconds, name))) for name in names}


def _scalar(value: Any) -> Any:
    return np.squeeze(value)


def _interval(value: Any, spread: float, unit: str) -> Estimate:
    found = float(_scalar(value))
    return Estimate(value=found, low=found / spread, high=found * spread, unit=unit, tier=Tier.DATASHEET)


def estimate_rate(asked: Server, load: RequestLoad, requests_per_s: float) -> LoadEstimate:
    """Latencies at an arrival rate of `requests_per_s` (open loop).

    Raises InfeasibleError where the server cannot keep up.
    """
    return estimate_load(asked, replace(load, concurrency=concurrency_at(asked, load, requests_per_s)))


def concurrency_at(asked: Server, load: RequestLoad, requests_per_s: float, rates: ServingRates | None = None) -> float:
    """Requests in flight of an open loop. Raises InfeasibleError where the server cannot keep up."""
    rates = asked.rates if rates is None else rates
    high = state(asked, replace(load, concurrency=None), rates).in_flight
    most = state(asked, replace(load, concurrency=high), rates).requests_per_s  # those that fit, and none that waits
    if requests_per_s > SATURATED * most:
        raise InfeasibleError(
            f"{requests_per_s:g} requests/s are more than the server finishes: {most:.4g} requests/s "
            f"with {high:,.0f} in flight",
            hint="more replicas, or a lower rate",
        )
    low = 1e-3
    for _ in range(ITERATIONS):
        middle = (low * high) ** 0.5
        served = state(asked, replace(load, concurrency=middle), rates).requests_per_s
        low, high = (middle, high) if served < requests_per_s else (low, middle)
    return high
