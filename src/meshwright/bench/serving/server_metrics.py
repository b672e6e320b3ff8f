"""A server's own count of its requests and its cache while it is measured, from its Prometheus metrics.

`server_metrics.toml` has the names of each project. Samples of several engines or ranks are added up, and of cache
usage averaged. Format: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import asyncio
import math
import re
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import aiohttp

from meshwright.bench.serving.endpoint import Endpoint

PATHS = ("/metrics", "/prometheus/metrics")
EVERY_S, TIMEOUT_S = 1.0, 5.0
MOST_BYTES = 2**23
SAMPLE = r'^({names})(?:\{{(?:[^"}}\n]|"(?:[^"\\\n]|\\.)*")*\}})?[ \t]+(\S+)'
"""A line of one of the names: the name and its value, without its labels."""


@dataclass(frozen=True, kw_only=True)
class ServerReading:
    """One look at a server; None: it does not say."""

    running: float | None = None  # requests
    waiting: float | None = None
    cache_usage: float | None = None  # share
    hits: float | None = None  # tokens of prompts that the prefix cache had, since the server began
    looked: float | None = None  # tokens of prompts that were looked for in it
    preemptions: float | None = None


@cache
def _names() -> tuple[dict[str, tuple[str, ...]], re.Pattern[str]]:
    """Names of each field of a reading, and what finds a sample of any."""
    tables = tomllib.loads(Path(__file__).with_name("server_metrics.toml").read_text(encoding="utf-8")).values()
    names = {f.name: tuple(n for table in tables for n in table.get(f.name, ())) for f in fields(ServerReading)}
    every = "|".join(re.escape(name) for found in names.values() for name in found)
    return names, re.compile(SAMPLE.format(names=every), re.MULTILINE)


def reading(text: str) -> ServerReading | None:
    """Read the metrics of a server; None where they have no known name.

    >>> reading('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_running{engine="1"} 1.0').running
    3.0
    """
    names, sample = _names()
    samples: dict[str, list[float]] = {}
    for name, value in sample.findall(text):
        with suppress(ValueError):
            if math.isfinite(number := float(value)) and number >= 0:
                samples.setdefault(name, []).append(number)
    found = {}
    for field, known in names.items():
        values = next((samples[name] for name in known if name in samples), None)
        if values is not None:
            found[field] = sum(values) / (len(values) if field == "cache_usage" else 1)
    return ServerReading(**found) if found else None


@asynccontextmanager
async def watched(endpoint: Endpoint) -> AsyncIterator[list[ServerReading]]:
    """Yield a list that gets a reading before, each second, and after; it stays empty where a server has no metrics."""
    readings: list[ServerReading] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(endpoint.headers)) as session:
        url = None
        for path in PATHS:
            if (found := await _read(session, endpoint.base_url + path)) is not None:
                url, readings = endpoint.base_url + path, [found]
                break
        if url is None:
            yield readings
            return

        async def look() -> None:
            if (found := await _read(session, url)) is not None:
                readings.append(found)

        async def repeat() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                await look()

        task = asyncio.create_task(repeat())
        try:
            yield readings
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await look()


async def _read(session: aiohttp.ClientSession, url: str) -> ServerReading | None:
    """One reading; None where there are no metrics, or more than `MOST_BYTES`."""
    data = bytearray()
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return None
            async for part in response.content.iter_any():
                data += part
                if len(data) > MOST_BYTES:
                    return None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return reading(data.decode("utf-8", errors="replace"))


def server_fields(readings: Sequence[ServerReading]) -> dict[str, float | int | None]:
    """Fields of a `ServingPoint`: means and the peak of the readings during the load, and growth of the counters.

    >>> first, last = ServerReading(hits=1, looked=8), ServerReading(hits=6, looked=18)
    >>> [server_fields(both)["server_hit_ratio"] for both in ([first, last], [last, first])]
    [0.5, None]
    """
    during = readings[1:-1] or readings[-1:]

    def known(name: str) -> list[float]:
        return [value for one in during if (value := getattr(one, name)) is not None]

    def grown(name: str) -> float | None:
        first, *_, last = (getattr(one, name) for one in (readings[0], *readings)) if readings else (None, None)
        return None if first is None or last is None or last < first else last - first  # less: it began again

    means = {f"server_{n}": sum(v) / len(v) if (v := known(n)) else None for n in ("running", "waiting")}
    hits, looked, preempted = grown("hits"), grown("looked"), grown("preemptions")
    return means | {
        "server_cache_usage": max(known("cache_usage"), default=None),
        "server_hit_ratio": min(hits / looked, 1.0) if looked and hits is not None else None,
        "server_preemptions": None if preempted is None else round(preempted),
    }
