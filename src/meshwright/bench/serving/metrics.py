"""Compute rates and latencies of a load from its requests.

All rates are over the wall time of the load, from its start to the end of its last request, and count
successful requests only. Steady rates exclude ramp and drain: they are over the time between the first and
the last moment at which at least 90 % of the peak was in flight. Percentiles interpolate linearly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.bench.serving.loads import LoadOutcome
from meshwright.records.measurement import Measurement
from meshwright.records.serving import (
    Latency,
    Load,
    RequestRecord,
    RequestStatus,
    ServingPoint,
    TokenSource,
    sum_known,
    token_rates,
)

STEADY_RATIO = 0.9
MANY = 100
"""Samples from which the interval of the median is computed by the normal approximation of order statistics."""


@dataclass(frozen=True, kw_only=True)
class LatencyBounds:
    """Bounds of one request in seconds: first token, per output token, end to end."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None

    def holds(self, request: RequestRecord) -> bool:
        """Return True if the request was successful and within all bounds. One token has no time per output token."""
        measured = ((request.ttft_s, self.ttft_s), (request.tpot_s, self.tpot_s), (request.e2e_s, self.e2e_s))
        return request.status is RequestStatus.OK and all(
            bound is None or value is None or value <= bound for value, bound in measured
        )


def latency(samples: Sequence[float]) -> Latency | None:
    """Distribution of samples; None without any."""
    if not samples:
        return None
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    p50, p90, p95, p99 = (float(x) for x in np.percentile(ordered, [50, 90, 95, 99]))
    low, high = _median_interval(ordered)
    return Latency(
        n=len(ordered), mean=float(ordered.mean()), median=p50, median_low=low, median_high=high,
        p90=p90, p95=p95, p99=p99, low=float(ordered[0]), high=float(ordered[-1]),
    )  # fmt: skip


def _median_interval(ordered: np.ndarray) -> tuple[float, float]:
    """95 % interval of the median by order statistics; the range below six samples."""
    n = len(ordered)
    if n < MANY:
        return Measurement(seconds=tuple(map(float, ordered))).interval
    k = max(1, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return float(ordered[k - 1]), float(ordered[n - k])


def serving_point(
    outcome: LoadOutcome, *, load: Load, repeat: int, started: str, bounds: LatencyBounds | None = None
) -> ServingPoint:
    """Compute all rates and latencies of one load."""
    records = outcome.records
    done = [r for r in records if r.status is RequestStatus.OK]
    failed = [r for r in records if r.status is not RequestStatus.OK]
    wall_s = outcome.wall_s
    num_input, num_output = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    num_chunks = sum(len(r.chunk_s) for r in done)
    steady = _steady_window(records)
    rates = _rates(done, steady) if steady else None
    bounds = bounds or LatencyBounds()
    good = None if bounds.is_empty else sum(bounds.holds(r) for r in records)
    busy = sum(r.end_s - r.sent_s for r in records)

    def per_s(count: float) -> float:
        return count / wall_s if wall_s > 0 else 0.0

    return ServingPoint(
        load=load,
        repeat=repeat,
        started=started,
        interrupted=outcome.interrupted,
        num_requests=outcome.num_sent,
        errors=dict(Counter(r.status for r in failed)),
        http_statuses=dict(Counter(str(r.http_status) for r in failed if r.http_status is not None)),
        num_reconnects=sum(r.num_reconnects for r in records),
        num_retries=sum(r.num_retries for r in records),
        cached_tokens=sum_known(r.cached_tokens for r in done),
        num_malformed_events=sum(r.num_malformed for r in records),
        num_short=sum(r.output_tokens < r.asked_output_tokens for r in done),
        token_source=_source(done),
        lost_output_tokens=sum(max(r.output_tokens, len(r.chunk_s)) for r in failed),
        steady_s=steady[1] - steady[0] if steady else None,
        steady_output_tokens_per_s=rates[0] if rates else None,
        steady_total_tokens_per_s=rates[1] if rates else None,
        mean_in_flight=outcome.mean_in_flight,
        peak_in_flight=outcome.peak_in_flight,
        littles_law_ratio=outcome.mean_in_flight * wall_s / busy if busy > 0 else None,
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        send_delay_s=latency([r.sent_s - r.due_s for r in records]),
        good_requests_per_s=None if good is None else per_s(good),
        good_ratio=None if good is None or not records else good / len(records),
        reasoning_tokens=sum(r.num_reasoning for r in done),
        chunks_per_s=per_s(sum(len(r.chunk_s) for r in records)),
        **token_rates(wall_s=wall_s, done=len(done), num_input=num_input, num_output=num_output),
        **_latencies(done),
    )


def _latencies(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Latencies of successful requests; a request without one of them does not count in it."""
    gaps = [b - a for r in done for a, b in zip(r.chunk_s, r.chunk_s[1:], strict=False)]
    return {
        "ttft_s": latency([r.ttft_s for r in done if r.ttft_s is not None]),
        "chunk_gap_s": latency(gaps),
        "tpot_s": latency([r.tpot_s for r in done if r.tpot_s is not None]),
        "e2e_s": latency([r.e2e_s for r in done]),
        "first_answer_s": latency([r.first_answer_s for r in done if r.first_answer_s is not None]),
    }


def _source(done: Sequence[RequestRecord]) -> TokenSource:
    sources = {r.token_source for r in done}
    return sources.pop() if len(sources) == 1 else TokenSource.MIXED if sources else TokenSource.USAGE


def _steady_window(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """Begin and end of the steady state; None when it is shorter than the mean request."""
    if not records:
        return None
    sent = np.array([r.sent_s for r in records])
    ended = np.array([r.end_s for r in records])
    times = np.concatenate([sent, ended])
    changes = np.concatenate([np.ones_like(sent), -np.ones_like(ended)])
    order = np.lexsort((changes, times))
    times, counts = times[order], np.cumsum(changes[order])
    above = np.flatnonzero(counts >= STEADY_RATIO * counts.max())
    begin, end = float(times[above[0]]), float(times[min(above[-1] + 1, len(times) - 1)])
    return (begin, end) if end - begin > float((ended - sent).mean()) else None


def _rates(done: Sequence[RequestRecord], window: tuple[float, float]) -> tuple[float, float]:
    """Output and total tokens/s inside a window.

    Output tokens count at the arrival of their chunk, in equal parts of the request; input tokens at the first one.
    """
    begin, end = window
    num_input = num_output = 0.0
    for r in done:
        if r.chunk_s:
            inside = sum(begin < s <= end for s in r.chunk_s)
            num_output += inside * r.output_tokens / len(r.chunk_s)
            num_input += r.input_tokens * (begin < r.chunk_s[0] <= end)
    return num_output / (end - begin), (num_input + num_output) / (end - begin)
