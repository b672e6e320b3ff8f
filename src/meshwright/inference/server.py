"""A server, its steady states under rising loads, and the load at which it finishes so many requests per second.

Requests in flight = rate x time of a request (Little's law) in every state: at an arrival rate they follow from it.

Disaggregated: some replicas only prefill and send the cache of a prompt to those that only decode, so a prompt never
delays a decode step. With X requests/s, C in flight and r = X t_prefill / prefill places busy of the pool:

    wait for a prefill place   t_prefill / places x a r / (1 - a r),  a = 1 - 1/C

An arriving request finds what C - 1 requests leave in the queue, on average (Schweitzer 1979), and several places are
one that is as many times faster, and a delay (Seidmann et al. 1987). One request alone never waits. Requests for which
the replicas that decode have no room wait too, before their first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.arrays import Array, FloatArray, Mask
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.capacity import Reserve, shipped_reserve
from meshwright.inference.constants import ServingCalibration, shipped_constants
from meshwright.inference.layout import check_layout
from meshwright.inference.memory import session_bytes
from meshwright.inference.predict import rates_for
from meshwright.inference.rates import ServingRates, prefill_seconds
from meshwright.inference.serving import (
    BatchLimit,
    EngineTraits,
    RequestLoad,
    Steady,
    batch_limit,
    eager_s,
    outside_s,
    prefill_steps_s,
    request_work,
    steady,
)
from meshwright.inference.work import Served

LEAST = 1e-9
"""Smallest load that is looked at, as a share of the largest."""

PARTS, ROUNDS = 256, 4
"""A crossing is found to a share of ln(1 / LEAST) / PARTS^ROUNDS, 5e-9."""


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

    @cached_property
    def rates(self) -> ServingRates:
        """Fitted rates of this system."""
        return rates_for(self.of, self.engine, self.calibration)

    @property
    def decoding(self) -> Served:
        """The replicas that decode."""
        layout = self.of.layout
        return replace(self.of, layout=replace(layout, replicas=layout.replicas - self.prefill_replicas))

    @property
    def prefill_places(self) -> int:
        """Prompts that the replicas that only prefill compute at once."""
        return self.prefill_replicas * self.of.layout.attention_data * self.of.layout.pipeline


def server(of: Served, engine: EngineTraits, *, reserve: Reserve | None = None, prefill_replicas: int = 0) -> Server:
    """A server with the shipped constants."""
    return Server(
        of=of, engine=engine, reserve=reserve or shipped_reserve(), calibration=shipped_constants(),
        prefill_replicas=prefill_replicas,
    )  # fmt: skip


def states(asked: Server, load: RequestLoad, batches: Array) -> Steady:
    """States with `batches` requests in flight on each replica that decodes. None waits for memory.

    `load.concurrency` is not read. In flight is infinite where the replicas that prefill cannot keep up.
    """
    limit = BatchLimit(sequences=batches, binds="concurrency")
    load = replace(load, concurrency=None, lockstep=load.lockstep and not asked.prefill_replicas)
    work = request_work(asked.decoding, load, asked.engine, limit)
    if not asked.prefill_replicas:
        return steady(work, asked.rates)
    found = steady(replace(work, waited_steps=0.0), asked.rates)
    prompt = prefill_seconds(
        work.prompt, asked.rates, work.token_steps, eager_s=eager_s(work, asked.rates, work.token_steps)
    )
    of_step_s = np.clip(batches - 1, 0.0, 1.0) * found.step.total / 2  # that the request finds where it decodes
    first_s = outside_s(work, asked.rates) + prefill_steps_s(work, asked.rates, 1.0) + of_step_s
    return _disaggregated(asked, load, batches, replace(found, prompt=prompt, ttft_s=first_s))


def _disaggregated(asked: Server, load: RequestLoad, batches: Array, mixed: Steady) -> Steady:
    gaps = load.output_tokens - 1
    if not gaps:
        raise InputError(
            "replicas that only prefill leave the others nothing to decode", got="answers of 1 token",
            allowed="output_tokens above 1",
        )  # fmt: skip
    decode_s = gaps / (1 + load.accepted_per_step) * mixed.step.total
    requests = asked.decoding.layout.replicas * batches / decode_s
    unhindered_s = mixed.ttft_s + transfer_s(asked.of, load.input_tokens) + decode_s
    prompt_s = mixed.prompt.total / (asked.prefill_replicas * asked.of.layout.pipeline)
    busy, unhindered = np.minimum(requests * prompt_s, 1.0), requests * unhindered_s
    # C = unhindered + a busy^2 / (1 - a busy) with a = 1 - 1/C is quadratic in C
    rest = np.maximum(unhindered - busy, 0.0)
    with np.errstate(divide="ignore"):
        queued = (rest + np.sqrt(rest**2 + 4 * busy * rest / (1 - busy))) / 2
    in_flight = np.where((unhindered > 1) | (busy == 1), queued, unhindered)
    rate = requests * load.output_tokens
    return replace(
        mixed, in_flight=in_flight, request_s=in_flight / requests, itl_s=decode_s / gaps,
        ttft_s=in_flight / requests - decode_s, output_tokens_per_s=rate,
        total_tokens_per_s=rate * (load.input_tokens + load.output_tokens) / load.output_tokens,
    )  # fmt: skip


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


def full(asked: Server, load: RequestLoad) -> tuple[BatchLimit, float]:
    """Most requests on one replica that decodes, and the places of all replicas, those of prompts included.

    Raises InfeasibleError where not one request fits.
    """
    limit = batch_limit(
        asked.decoding, replace(load, concurrency=None), asked.engine, asked.reserve,
        prefills=not asked.prefill_replicas,
    )  # fmt: skip
    return limit, float(limit.sequences) * asked.decoding.layout.replicas + asked.prefill_places


def state(asked: Server, load: RequestLoad) -> tuple[BatchLimit, Steady]:
    """The state under `load.concurrency`, or with as many requests as fit. Raises InfeasibleError where none fits."""
    if not asked.prefill_replicas:
        limit = batch_limit(asked.decoding, load, asked.engine, asked.reserve)
        return limit, steady(request_work(asked.decoding, load, asked.engine, limit), asked.rates)
    limit, places = full(asked, load)
    in_flight = load.concurrency or places
    batch, _ = crossing(lambda some: states(asked, load, some).in_flight <= in_flight, float(limit.sequences))
    if batch < limit.sequences:
        limit = BatchLimit(sequences=batch, binds="concurrency" if load.concurrency else "prefill")
    found = states(asked, load, batch)
    request_s = in_flight * load.output_tokens / found.output_tokens_per_s
    decode_s = found.request_s - found.ttft_s
    return limit, replace(found, in_flight=in_flight, request_s=request_s, ttft_s=request_s - decode_s)


def rate_load(asked: Server, load: RequestLoad, requests_per_s: float) -> RequestLoad:
    """The load whose requests in flight finish `requests_per_s`.

    Raises InfeasibleError where the server cannot keep up.
    """
    limit, places = full(asked, load)

    def served(batches: Array) -> tuple[Array, Array]:
        found = states(asked, load, batches)
        return found.output_tokens_per_s / load.output_tokens, found.in_flight

    def slower(batches: FloatArray) -> Mask:
        rate, in_flight = served(batches)
        return (rate < requests_per_s) & (in_flight <= places)

    last, batch = crossing(slower, float(limit.sequences))
    rate, in_flight = (float(np.squeeze(value)) for value in served(batch))
    if rate < requests_per_s or in_flight > places * (1 + 1e-9):
        rate, in_flight = (float(np.squeeze(value)) for value in served(last))
        raise InfeasibleError(
            f"{requests_per_s:g} requests/s are more than the server finishes: {rate:.4g} requests/s "
            f"with {in_flight:,.0f} in flight",
            hint="more replicas, or a lower rate",
        )
    return replace(load, concurrency=in_flight)


def crossing(kept: Callable[[FloatArray], Mask], high: float, low: float = 0.0) -> tuple[float, float]:
    """The numbers from `low` to `high` between which `kept` ends, which holds below: the last kept, the first not.

    Both are `high` where all is kept, and the first number where none is. `low` 0 is the share `LEAST` of `high`.
    """
    low = low or high * LEAST
    for _ in range(ROUNDS):
        grid = np.geomspace(low, high, PARTS + 1)
        holds = np.broadcast_to(kept(grid), grid.shape)
        if holds.all():
            return high, high
        first = int(np.argmin(holds))
        low, high = float(grid[max(first - 1, 0)]), float(grid[first])
        if first == 0:
            break
    return low, high
