"""`bench offline`: batch throughput of one or several replicas of a server, for pairs of input and output lengths.

All requests of a batch are handed over at once, in equal shares to the replicas, and the batch ends with its last
answer. Replicas run at the same time and are measured together: contention for host, power and memory is inside. A
larger number of replicas is only extrapolated, and then the result carries the word and the factor.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from meshwright.bench.serving.bench import measure_scale
from meshwright.bench.serving.ceiling import client_ceiling, judged
from meshwright.bench.serving.client import Client, open_session
from meshwright.bench.serving.endpoint import Endpoint, ServingPrompt
from meshwright.bench.serving.loads import LoadOutcome, run_load
from meshwright.bench.serving.metrics import serving_point
from meshwright.bench.serving.prompts import LengthKind, Lengths, PromptSource
from meshwright.errors import InputError
from meshwright.records.files import now
from meshwright.records.serving import Load, ServingPoint

SOURCE_PAIRS = "128/128,128/2048,128/4096,500/2000,1000/1000,1000/2000,1024/2048,2048/128,2048/2048,5000/500,20000/2000"
"""Pairs of TensorRT-LLM 0.19's published table, which the MI355X study (Signal65, June 2025) repeats."""
LONGEST = 10**7


@dataclass(frozen=True, kw_only=True)
class LengthPair:
    """Input and output tokens of each request of a batch."""

    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}"


def parse_pairs(text: str) -> tuple[LengthPair, ...]:
    """Read `128/128,2048/128`. Raises InputError.

    >>> [pair.name for pair in parse_pairs("128/128,2048/128")]
    ['128/128', '2048/128']
    """
    found = []
    for part in text.split(","):
        first, slash, second = part.strip().partition("/")
        is_right = slash and first.isdecimal() and second.isdecimal()
        if not is_right or not (1 <= int(first) <= LONGEST and 1 <= int(second) <= LONGEST):
            raise InputError("--pairs must read INPUT/OUTPUT,...", got=text, allowed="as in 128/128,2048/128")
        found.append(LengthPair(input_tokens=int(first), output_tokens=int(second)))
    if len(set(found)) < len(found):
        raise InputError("--pairs names a pair twice", got=text)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class OfflineRequest:
    """Request of one `bench offline`. `endpoints` are the replicas."""

    endpoints: tuple[Endpoint, ...]
    pairs: tuple[LengthPair, ...]
    num_requests: int  # of a batch, over all replicas
    num_warmup: int  # on each replica, before each batch
    source: PromptSource
    extrapolate_to: int | None = None  # replicas


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """A rate that was not measured: the rate of the measured replicas times a factor."""

    label: str
    factor: float
    num_replicas: int
    output_tokens_per_s: float
    total_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class OfflinePoint:
    """Measurement of one pair. `by_replica` are the output tokens/s of each replica over the whole batch."""

    pair: LengthPair
    num_replicas: int
    point: ServingPoint
    by_replica: tuple[float, ...]
    extrapolated: Extrapolation | None = None


async def measure_offline(request: OfflineRequest, *, done: Callable[[OfflinePoint], None]) -> tuple[OfflinePoint, ...]:
    """Measure all pairs. Raises InputError when no server answers, CancelledError when interrupted."""
    ceiling = await client_ceiling(request.num_requests)
    source = request.source
    if source.tokenizer is None:
        source = replace(source, scale=await measure_scale(request.endpoints[0]))
    found: list[OfflinePoint] = []
    for pair in request.pairs:
        measured = await _measure_pair(request, replace(
            source,
            inputs=Lengths(kind=LengthKind.FIXED, first=pair.input_tokens),
            outputs=Lengths(kind=LengthKind.FIXED, first=pair.output_tokens),
        ), pair)  # fmt: skip
        point = judged(measured.point, ceiling)
        more = extrapolation(point, measured=len(request.endpoints), wanted=request.extrapolate_to)
        found.append(replace(measured, point=point, extrapolated=more))
        done(found[-1])
        if point.interrupted:
            raise asyncio.CancelledError
    return tuple(found)


async def _measure_pair(request: OfflineRequest, source: PromptSource, pair: LengthPair) -> OfflinePoint:
    """Hand a batch to all replicas at once."""
    num_replicas = len(request.endpoints)
    prompts = source.prompts(load=pair.name, repeat=1)
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(open_session(e)) for e in request.endpoints]
        replicas = list(zip(sessions, request.endpoints, strict=True))
        if request.num_warmup:
            warm = source.prompts(load=f"warm-up of {pair.name}", repeat=1)
            clients = [Client(session=s, endpoint=e, start_s=time.perf_counter()) for s, e in replicas]
            await asyncio.gather(*(_batch(c, warm, request.num_warmup) for c in clients))
        started = now()
        begin_s = time.perf_counter()
        clients = [Client(session=s, endpoint=e, start_s=begin_s) for s, e in replicas]
        sizes = [len(range(i, request.num_requests, num_replicas)) for i in range(num_replicas)]
        outcomes = await asyncio.gather(*(_batch(c, prompts, n) for c, n in zip(clients, sizes, strict=True)))
    wall_s = max(o.wall_s for o in outcomes)
    merged = LoadOutcome(
        records=tuple(r for o in outcomes for r in o.records),
        num_sent=sum(o.num_sent for o in outcomes),
        mean_in_flight=sum(o.mean_in_flight * o.wall_s for o in outcomes) / wall_s if wall_s else 0.0,
        peak_in_flight=sum(o.peak_in_flight for o in outcomes),
        wall_s=wall_s,
        interrupted=any(o.interrupted for o in outcomes),
    )
    load = Load(concurrency=request.num_requests)
    point = serving_point(merged, load=load, repeat=1, started=started)
    separate = [serving_point(o, load=load, repeat=1, started=started) for o in outcomes]
    return OfflinePoint(
        pair=pair,
        num_replicas=num_replicas,
        point=point,
        by_replica=tuple(p.output_tokens / wall_s if wall_s else 0.0 for p in separate),
    )


async def _batch(client: Client, prompts: Iterator[ServingPrompt], count: int) -> LoadOutcome:
    chosen = [next(prompts) for _ in range(count)]
    return await run_load(client, Load(concurrency=max(1, count)), chosen, num_requests=count)


def extrapolation(point: ServingPoint, *, measured: int, wanted: int | None) -> Extrapolation | None:
    """The rates of `wanted` replicas, if they were asked for and the measured ones can be used."""
    if wanted is None or wanted == measured or not point.is_usable:
        return None
    factor = wanted / measured
    return Extrapolation(
        label=f"extrapolated x {factor:g} from {measured} measured {'replica' if measured == 1 else 'replicas'}",
        factor=factor,
        num_replicas=wanted,
        output_tokens_per_s=factor * point.output_tokens_per_s,
        total_tokens_per_s=factor * point.total_tokens_per_s,
    )


def run_offline(request: OfflineRequest, *, done: Callable[[OfflinePoint], None]) -> tuple[OfflinePoint, ...]:
    """`measure_offline` in an event loop of its own. Raises KeyboardInterrupt when interrupted."""
    try:
        return asyncio.run(measure_offline(request, done=done))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@dataclass(frozen=True, kw_only=True)
class OfflineComparison:
    """Ratios of output tokens/s to an earlier measurement, over the pairs that both have."""

    ratios: dict[str, float]  # by pair
    geometric_mean: float | None
    not_in_both: tuple[str, ...]


def compare(found: Sequence[OfflinePoint], earlier: dict[str, float]) -> OfflineComparison:
    """Compare measured rates with `earlier`, output tokens/s by pair. Extrapolated rates are not compared."""
    rates = {p.pair.name: p.point.output_tokens_per_s for p in found if p.point.is_usable}
    both = {name: rate / earlier[name] for name, rate in rates.items() if earlier.get(name)}
    mean = math.exp(sum(map(math.log, both.values())) / len(both)) if both else None
    return OfflineComparison(
        ratios=both, geometric_mean=mean, not_in_both=tuple(sorted({*rates, *earlier} - set(both)))
    )
