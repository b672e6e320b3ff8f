"""`bench serve`: all loads and repeats against one endpoint, recorded as they end.

self-test of the client       its ceiling before
word scale                    two small requests, unless a tokenizer is given
for each repeat:              a drift of the server affects all loads alike
    for each load:  warm-up, then the load  ->  one line of the records
self-test of the client       its ceiling after; the smaller one counts
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from meshwright.bench.serving.ceiling import client_ceiling, judged
from meshwright.bench.serving.client import Client, open_session
from meshwright.bench.serving.endpoint import Endpoint, ServingPrompt, field_hint
from meshwright.bench.serving.events import LARGEST_EVENT_BYTES
from meshwright.bench.serving.loads import LoadOutcome, run_load
from meshwright.bench.serving.metrics import LatencyBounds, serving_point
from meshwright.bench.serving.prompts import PromptSource, WordScale, random_text, word_scale
from meshwright.bench.serving.server_metrics import server_fields, watched
from meshwright.bench.serving.servers.processor import ThreadTimes, thread_times, wait_ratio
from meshwright.bench.serving.summary import LoadSummary, MedianBounds, search_concurrency, summaries
from meshwright.errors import MOST_NAMES, InputError, Terminated
from meshwright.json_values import parse_json
from meshwright.records.files import now
from meshwright.records.serving import Arrivals, Load, RequestStatus, ServingPoint, ServingRecorder, TokenSource

LONGEST_SCALE_LENGTH = 64
PREFLIGHT_TIMEOUT_S = 30.0
REFUSED_STATUSES = (301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 422)
"""HTTP statuses that every further request would get too."""


@dataclass(frozen=True, kw_only=True)
class ServingBenchRequest:
    """Request of one `bench serve`."""

    endpoint: Endpoint
    loads: tuple[Load, ...]
    source: PromptSource
    num_requests: int  # of each load and repeat
    num_warmup: int | None = None  # before each load; None: as many as are in flight
    ramp_s: float = 0.0
    duration_s: float | None = None
    repeats: int = 1
    bounds: LatencyBounds | None = None  # of goodput
    search: MedianBounds | None = None  # instead of `loads`
    most_in_flight: int = 64  # of the search
    has_self_test: bool = True
    seed: int = 0
    server_pid: int | None = None  # of a server on this machine, whose waiting for processors is recorded


@dataclass(frozen=True, kw_only=True)
class ServingBenchOutcome:
    """Measurements of one `bench serve`."""

    points: tuple[ServingPoint, ...]
    scale: WordScale | None
    ceilings: tuple[float, ...]  # chunks/s of the client, before and after
    found: int | None = None  # concurrency that the search found

    @property
    def summaries(self) -> list[LoadSummary]:
        return summaries(self.points)


@dataclass(kw_only=True)
class _Bench:
    request: ServingBenchRequest
    recorder: ServingRecorder
    begin: Callable[[Load, int], None]
    done: Callable[[ServingPoint], None]
    source: PromptSource
    ceilings: list[float] = field(default_factory=list)

    async def measure(self, load: Load, repeat: int) -> ServingPoint:
        """Measure one load once and record it. Raises CancelledError after a partial result was recorded."""
        earlier = self.recorder.measured(load, repeat)
        if earlier is not None:
            return earlier
        self.begin(load, repeat)
        request = self.request
        started = now()
        async with open_session(request.endpoint) as session:
            await self._warm_up(session, load, repeat)
            rows = self.source.rows
            async with watched(request.endpoint) as readings:
                client = Client(
                    session=session, endpoint=request.endpoint, start_s=time.perf_counter(),
                    count_tokens=self.source.tokenizer.count if self.source.tokenizer else None,
                )  # fmt: skip
                before = self._thread_times()
                outcome = await run_load(
                    client, load, self.source.prompts(load=load.name, repeat=repeat),
                    num_requests=request.num_requests, ramp_s=request.ramp_s, duration_s=request.duration_s,
                    due_s=[row.at_s or 0.0 for row in rows] if load.arrivals is Arrivals.TRACE else None,
                    seed=request.seed + repeat,
                )  # fmt: skip
                waited = wait_ratio(before, self._thread_times())
        point = serving_point(outcome, load=load, repeat=repeat, started=started, bounds=request.bounds)
        return self._record(outcome, replace(point, server_wait_ratio=waited, **server_fields(readings)))

    def _thread_times(self) -> ThreadTimes:
        pid = self.request.server_pid
        return {} if pid is None else thread_times(pid)

    def _record(self, outcome: LoadOutcome, point: ServingPoint) -> ServingPoint:
        if self.ceilings:
            point = judged(point, min(self.ceilings))
        self.recorder.append_requests(point.load, point.repeat, outcome.records)
        self.recorder.append(point)
        self.done(point)
        if outcome.interrupted:
            raise asyncio.CancelledError
        return point

    async def _warm_up(self, session: aiohttp.ClientSession, load: Load, repeat: int) -> None:
        """Send requests that are not recorded; their connections stay open."""
        in_flight = load.concurrency or 1
        count = self.request.num_warmup if self.request.num_warmup is not None else in_flight
        if count:
            client = Client(session=session, endpoint=self.request.endpoint, start_s=time.perf_counter())
            prompts = self.source.prompts(load=f"warm-up of {load.name}", repeat=repeat)
            outcome = await run_load(client, Load(concurrency=min(in_flight, count)), prompts, num_requests=count)
            if outcome.interrupted:
                raise asyncio.CancelledError


async def measure_serving(
    request: ServingBenchRequest,
    *,
    recorder: ServingRecorder,
    begin: Callable[[Load, int], None],
    done: Callable[[ServingPoint], None],
) -> ServingBenchOutcome:
    """Measure all loads and repeats. Raises InputError when no server answers, CancelledError when interrupted."""
    bench = _Bench(request=request, recorder=recorder, begin=begin, done=done, source=request.source)
    most = max((load.concurrency or 1 for load in request.loads), default=request.most_in_flight)
    found = None
    if request.has_self_test:
        bench.ceilings.append(await client_ceiling(most))
    scale = None
    async with _sigterm_cancels():
        if request.source.tokenizer is None and not all(_has_text(row) for row in request.source.rows or (None,)):
            scale = await measure_scale(request.endpoint)
            bench.source = replace(request.source, scale=scale)
        if request.search is not None:
            found = await _search(bench, request.search)
        else:
            for repeat in range(1, request.repeats + 1):
                for load in request.loads:
                    await bench.measure(load, repeat)
    if request.has_self_test:
        bench.ceilings.append(await client_ceiling(most))
        recorder.rewrite([judged(point, min(bench.ceilings)) for point in recorder.points])
    return ServingBenchOutcome(points=tuple(recorder.points), scale=scale, ceilings=tuple(bench.ceilings), found=found)


def _has_text(row: Any) -> bool:
    return row is not None and (row.text is not None or row.messages is not None)


async def _search(bench: _Bench, bounds: MedianBounds) -> int | None:
    known: dict[int, LoadSummary] = {}

    async def measure(concurrency: int) -> LoadSummary:
        if concurrency not in known:
            load = Load(concurrency=concurrency)
            points = [await bench.measure(load, repeat) for repeat in range(1, bench.request.repeats + 1)]
            known[concurrency] = LoadSummary(load=load, points=tuple(points))
        return known[concurrency]

    return await search_concurrency(measure, bounds.holds, most=bench.request.most_in_flight)


async def measure_scale(endpoint: Endpoint) -> WordScale:
    """Tokens per word as the server counts them, from two requests. One token per word if it counts none.

    Raises InputError when the server cannot be reached or refuses the first request.
    """
    rng = random.Random("word scale")
    points: list[tuple[int, int]] = []
    length, reason = LONGEST_SCALE_LENGTH, ""
    async with open_session(replace(endpoint, timeout_s=min(endpoint.timeout_s, 120.0))) as session:
        while len(points) < 2 and length:
            client = Client(session=session, endpoint=endpoint, start_s=time.perf_counter())
            prompt = ServingPrompt(text=random_text(length, rng), input_tokens=length, output_tokens=1)
            record = await client.send(prompt, index=0)
            if record.status is RequestStatus.NOT_CONNECTED:
                raise InputError(f"no server answers ({record.reason})", got=endpoint.url)
            if record.http_status in REFUSED_STATUSES:
                reason, length = record.reason, length // 2  # perhaps longer than its context
                continue
            if record.status is not RequestStatus.OK or record.token_source is not TokenSource.USAGE:
                return WordScale()
            points.append((length, record.input_tokens))
            length //= 4
    if not points:
        raise InputError(f"the server refuses requests ({reason})", got=endpoint.url, hint=field_hint(reason))
    if len(points) < 2:
        return WordScale()
    return word_scale(points)


async def served_model(base_url: str, headers: dict[str, str]) -> str:
    """Name of the only model of a server. Raises InputError when there is no server, no model or several."""
    timeout = aiohttp.ClientTimeout(total=PREFLIGHT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{base_url}/v1/models", allow_redirects=False) as response,
        ):
            if address := response.headers.get("Location"):
                raise InputError(
                    "the server redirects to another address", got=address, hint="name that one: --url URL"
                )
            found = await _json(response) if response.status == 200 else {}
            names = [str(model["id"]) for model in found.get("data", [])]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise InputError(
            f"no server answers ({type(error).__name__}: {error})".replace("\n", " "), got=base_url
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if len(names) != 1:
        names = f"{len(names):,} models" if len(names) > MOST_NAMES else names
        raise InputError("the server does not name one model", got=names, hint="name it: --model NAME")
    return names[0]


async def _json(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON of an answer. Raises ValueError."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > LARGEST_EVENT_BYTES:
            raise ValueError
    return parse_json(bytes(data))


@asynccontextmanager
async def _sigterm_cancels() -> AsyncIterator[None]:
    """Let SIGTERM cancel the measurement, so that partial results are kept."""
    loop, task, before = asyncio.get_running_loop(), asyncio.current_task(), signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)  # pyright: ignore[reportOptionalMemberAccess]
    except (NotImplementedError, RuntimeError, ValueError):  # no main thread, or no Unix
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def run_serving(
    request: ServingBenchRequest,
    *,
    recorder: ServingRecorder,
    begin: Callable[[Load, int], None],
    done: Callable[[ServingPoint], None],
) -> ServingBenchOutcome:
    """`measure_serving` in an event loop of its own. Raises KeyboardInterrupt on Ctrl-C, `Terminated` on SIGTERM."""
    try:
        return asyncio.run(measure_serving(request, recorder=recorder, begin=begin, done=done))
    except asyncio.CancelledError:  # by SIGTERM; after Ctrl-C asyncio raises KeyboardInterrupt
        raise Terminated from None
