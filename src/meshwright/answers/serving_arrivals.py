"""Latencies under arrivals as a table, and what to say of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from meshwright.answers.quantities import percent, seconds
from meshwright.answers.text_table import TextTable
from meshwright.errors import InputError
from meshwright.inference.arrivals import ArrivalEstimate

SETTLED = 0.1
"""Latencies have not settled where the two halves of the requests differ by more."""


def check_open_loop(requests_per_s: float | None, **given: object) -> None:
    """Raise InputError where options of arrivals are given without a rate."""
    named = [name for name, value in given.items() if value is not None]
    if requests_per_s is None and named:
        raise InputError(f"{', '.join(named)} without a rate of arrivals", hint="--rate N is requests per second")


def arrival_table(found: ArrivalEstimate) -> TextTable:
    """Mean and percentiles of the latencies; a caption with goodput and headroom."""
    bounds = {"ttft_s": found.bounds.ttft_s, "itl_s": found.bounds.itl_s}
    names = {"ttft_s": "TTFT", "itl_s": "ITL", "e2e_s": "end to end"}
    rows = []
    for name, values in found.simulated.percentiles().items() if found.simulated else ():
        bound = bounds.get(name, inf)
        rows.append((names[name], *map(seconds, values.values()), "" if bound == inf else seconds(bound)))
    return TextTable(
        title=f"{found.rate:g} requests/s, {found.arrivals} arrivals",
        headings=("latency", "mean", "p50", "p95", "p99", "bound"),
        rows=rows,
        caption=" ".join(_sentences(found)),
    )


def _sentences(found: ArrivalEstimate) -> Iterator[str]:
    simulated, bounds = found.simulated, found.bounds
    if simulated is None:
        yield (
            f"Not stable: the server finishes {found.capacity_per_s:.4g} requests/s with all places taken, so a queue "
            "that has formed grows without end. There are no latencies."
        )
    else:
        digits = 1 if simulated.in_flight < 100 else 0
        yield f"{len(simulated.e2e_s):,} simulated requests, {simulated.in_flight:,.{digits}f} in flight."
        yield "The means are those above: an arriving request does not find as many others as one of a closed loop."
        yield f"In {percent(simulated.queue_share)} of the time a request waits for a place or for other prompts."
        if (apart := simulated.half_difference) > SETTLED:
            yield f"Latencies have not settled: the two halves of the requests differ by {percent(apart)}."
    reach = f"up to {found.highest_per_s:.4g} requests/s, {found.highest_per_s / found.rate:.3g} times the rate."
    if bounds.is_empty:
        if simulated is not None:
            yield f"The server finishes {reach}"
        return
    if simulated is not None:
        good = simulated.good_share(bounds)
        yield f"{percent(good)} of the requests are within the bounds: goodput {good * found.rate:.4g} requests/s."
    whose = "The mean" if bounds.percentile is None else f"p{bounds.percentile:g}"
    if simulated is not None:
        both, limits = (simulated.bounded(bounds), simulated.half_widths(bounds)), (bounds.ttft_s, bounds.itl_s)
        for name, value, half, limit in zip(("TTFT", "ITL"), *both, limits, strict=True):
            if abs(value - limit) <= half:
                yield f"{whose} of {name} is {seconds(value)} ± {seconds(half)}: the bound is as near as chance."
    yield f"{whose} keeps them {reach}" if found.highest_per_s else f"{whose} keeps them at no rate."
