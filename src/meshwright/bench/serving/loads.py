"""One load on a server: requests in a closed or an open loop.

Closed loop: each of `concurrency` workers sends its next request when the answer to its last request has
ended. A ramp starts the workers one after the other. Open loop: requests are sent at their due times,
whatever the server does.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from meshwright.bench.serving.client import Client
from meshwright.bench.serving.endpoint import ServingPrompt
from meshwright.records.serving import Arrivals, Load, RequestRecord, due_times


@dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """Requests of one load, and the client's own count of requests in flight."""

    records: tuple[RequestRecord, ...]
    num_sent: int
    mean_in_flight: float
    peak_in_flight: int
    wall_s: float
    interrupted: bool = False


class InFlightMeter:
    """Integral over time of the number of requests in flight, from calls at each begin and end."""

    def __init__(self) -> None:
        self.count = self.peak = self.num_begun = 0
        self._area = self._last_s = 0.0

    def begin(self, now_s: float) -> None:
        """A request is sent."""
        self._advance(now_s)
        self.count += 1
        self.num_begun += 1
        self.peak = max(self.peak, self.count)

    def end(self, now_s: float) -> None:
        """A request has ended."""
        self._advance(now_s)
        self.count -= 1

    def mean(self, wall_s: float) -> float:
        """Mean number in flight over `wall_s`."""
        return self._area / wall_s if wall_s > 0 else 0.0

    def _advance(self, now_s: float) -> None:
        self._area += self.count * (now_s - self._last_s)
        self._last_s = now_s


async def run_load(
    client: Client,
    load: Load,
    prompts: Iterable[ServingPrompt],
    *,
    num_requests: int,
    ramp_s: float = 0.0,
    duration_s: float | None = None,
    due_s: Sequence[float] | None = None,
    seed: int = 0,
) -> LoadOutcome:
    """Put a load on the server. When it is cancelled, requests in flight are recorded as cancelled.

    `duration_s` ends the sending, not the requests in flight. `due_s` are the times of a trace.
    """
    meter, interrupted = InFlightMeter(), False
    limited = islice(iter(prompts), num_requests)
    gc.collect()
    gc.freeze()  # a collection of everything would stop the clock's readers for milliseconds
    client = replace(client, start_s=client.clock())  # the load begins here, not before the collection
    try:
        if load.arrivals is Arrivals.CLOSED:
            await _closed(client, load.concurrency or 1, limited, meter, ramp_s, duration_s)
        else:
            times = due_s if due_s is not None else list(due_times(load, num_requests, seed=seed))
            await _open(client, zip(limited, times, strict=False), meter, load.concurrency, duration_s)
    except asyncio.CancelledError:
        interrupted = True
    finally:
        gc.unfreeze()
    wall_s = max((record.end_s for record in client.records), default=0.0)
    return LoadOutcome(
        records=tuple(sorted(client.records, key=lambda record: record.index)),
        num_sent=meter.num_begun,
        mean_in_flight=meter.mean(wall_s),
        peak_in_flight=meter.peak,
        wall_s=wall_s,
        interrupted=interrupted,
    )


async def _send(
    client: Client, prompt: ServingPrompt, meter: InFlightMeter, *, index: int, due_s: float | None = None
) -> None:
    meter.begin(client.clock() - client.start_s)
    try:
        await client.send(prompt, index=index, due_s=due_s)
    finally:
        meter.end(client.clock() - client.start_s)


async def _closed(
    client: Client, concurrency: int, prompts: Iterator[ServingPrompt], meter: InFlightMeter, ramp_s: float,
    duration_s: float | None,
) -> None:  # fmt: skip
    numbered = enumerate(prompts)

    async def worker(number: int) -> None:
        await _sleep_until(client, ramp_s * number / concurrency)
        for index, prompt in numbered:
            if duration_s is not None and client.clock() - client.start_s >= duration_s:
                return
            await _send(client, prompt, meter, index=index)

    async with asyncio.TaskGroup() as workers:
        for number in range(concurrency):
            workers.create_task(worker(number))


async def _open(
    client: Client, due: Iterable[tuple[ServingPrompt, float]], meter: InFlightMeter, limit: int | None,
    duration_s: float | None,
) -> None:  # fmt: skip
    free = asyncio.Semaphore(limit) if limit else None

    async def one(index: int, prompt: ServingPrompt, due_s: float) -> None:
        if free is None:
            await _send(client, prompt, meter, index=index, due_s=due_s)
            return
        async with free:
            await _send(client, prompt, meter, index=index, due_s=due_s)

    async with asyncio.TaskGroup() as requests:
        for index, (prompt, due_s) in enumerate(due):
            if duration_s is not None and due_s >= duration_s:
                break
            await _sleep_until(client, due_s)
            requests.create_task(one(index, prompt, due_s))


async def _sleep_until(client: Client, at_s: float) -> None:
    delay_s = at_s - (client.clock() - client.start_s)
    if delay_s > 0:
        await asyncio.sleep(delay_s)
