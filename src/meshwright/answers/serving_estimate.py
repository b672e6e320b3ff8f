"""Latencies, rates, memory and price of a server under several loads: what `meshwright inference estimate` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from meshwright.answers import serving_question as questions
from meshwright.answers.quantities import rate, seconds, with_ends
from meshwright.answers.serving_arrivals import arrival_table, check_open_loop
from meshwright.answers.text_table import TextTable
from meshwright.errors import InputError
from meshwright.inference.arrivals import ArrivalEstimate, LatencyLimits, estimate_arrivals
from meshwright.inference.estimate import LoadEstimate, estimate_load, estimate_rate
from meshwright.inference.price import HourPrice, TokenPrice, token_price
from meshwright.inference.server import Server
from meshwright.inference.serving import RequestLoad
from meshwright.json_values import jsonable
from meshwright.result import Result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingEstimate(Result):
    """Estimates of a server under one load or several.

    Attributes:
        server: model, formats, layout, engine and memory.
        loads: one estimate for each load, with 80 % intervals.
        price: price of a device-hour; None if none is known.
        notes: cautions for the reader.
        arrivals: percentiles of latencies under a rate, by simulation; None without a rate.
    """

    server: Server
    loads: Sequence[LoadEstimate]
    price: HourPrice | None
    notes: tuple[str, ...]
    arrivals: ArrivalEstimate | None = None

    def prices(self) -> list[TokenPrice | None]:
        """Price and energy of tokens under each load; None without a price."""
        device = self.server.of.cluster.accelerator
        return [None if self.price is None else token_price(found, self.price, device) for found in self.loads]

    def to_dict(self) -> dict[str, Any]:
        of = self.server.of
        return jsonable(
            {
                "model": of.model.name, "cluster": of.cluster.name, "precision": of.weights.name,
                "kv_precision": of.cache.name, "engine": self.server.engine.name, "layout": of.layout,
                "prefill_replicas": self.server.prefill_replicas,
                "loads": [
                    {**found.as_json(), "price": price} for found, price in zip(self.loads, self.prices(), strict=True)
                ],
                **({} if self.arrivals is None else {"arrivals": self.arrivals}),
                "notes": self.notes,
            }
        )  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each load."""
        return [
            {
                "in_flight": found.in_flight, "asked_in_flight": found.load.concurrency,
                "bound_by": found.limit.binds, "ttft_s": found.ttft.value, **with_ends("itl_s", found.itl),
                **with_ends("output_tokens_per_s", found.output_tokens_per_s),
                "total_tokens_per_s": found.total_tokens_per_s.value,
                "usd_per_million_output_tokens": None if price is None else price.usd_per_million_output,
            }
            for found, price in zip(self.loads, self.prices(), strict=True)
        ]  # fmt: skip

    def summary(self) -> str:
        """Return layout, and rate and latency of the largest load."""
        of, last = self.server.of, self.loads[-1]
        return (
            f"{of.model.name} in {of.weights.name} on {of.cluster.name}, {of.layout.describe()}, "
            f"{self.server.engine.name}: {rate(last.output_tokens_per_s.value)} output tokens/s at "
            f"{_in_flight(last)} in flight, ITL {seconds(last.itl.value)}, TTFT {seconds(last.ttft.value)}"
        )

    def tables(self) -> list[TextTable]:
        """Latencies and rates by load, and under arrivals."""
        rows = []
        for found, price in zip(self.loads, self.prices(), strict=True):
            out, itl = found.output_tokens_per_s, found.itl
            speed = f"{found.interactivity:.0f}" if isfinite(found.interactivity) else ""  # none of one-token answers
            rows.append(
                (_in_flight(found), seconds(found.ttft.value), seconds(itl.value),
                 f"{rate(out.value)} ({rate(out.low)} to {rate(out.high)})", rate(found.total_tokens_per_s.value),
                 speed, "" if price is None else f"{price.usd_per_million_output:.3g}",
                 found.limit.binds)
            )  # fmt: skip
        headings = ("in flight", "TTFT", "ITL", "output tokens/s", "total", "per user", "USD/M output", "bound by")
        table = TextTable(title="", headings=headings, rows=rows, text_columns=("bound by",))
        return [table] if self.arrivals is None else [table, arrival_table(self.arrivals)]


def serving_estimate(
    *,
    model: str,
    cluster: str | Mapping[str, Any],
    precision: str | None = None,
    kv_precision: str | None = None,
    engine: str | None = None,
    input_tokens: int,
    output_tokens: int,
    input_spread: float | None = None,
    output_spread: float | None = None,
    prefix_hit_rate: float | None = None,
    concurrency: Sequence[float] = (),
    requests_per_s: float | None = None,
    arrivals: str | None = None,
    seed: int = 0,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    percentile: float | None = None,
    degrees: Mapping[str, int] | None = None,
    prefill_replicas: int = 0,
    drafted: int = 0,
    accepted: float = 0.0,
    draft: str | None = None,
    lockstep: bool = False,
    memory_ratio: float | None = None,
    terms: questions.PriceTerms | None = None,
    calibration: str | Path | None = None,
) -> ServingEstimate:
    """Estimate a server under closed loops of the given concurrencies, at a rate, or with as many requests as fit.

    `calibration` is a file of `meshwright inference calibrate`; it names the engine.

    Raises InputError for wrong input, InfeasibleError where nothing fits or the rate is too high.
    """
    if concurrency and requests_per_s is not None:
        raise InputError("concurrency and a rate are both given", hint="give one of them")
    check_open_loop(requests_per_s, arrivals=arrivals, ttft_s=ttft_s, itl_s=itl_s, percentile=percentile)
    bounds, under = LatencyLimits(ttft_s=ttft_s or inf, itl_s=itl_s or inf, percentile=percentile), None
    of = questions.served_model(
        model=model, cluster=cluster, precision=precision, kv_precision=kv_precision, degrees=degrees or {}
    )
    of = questions.with_draft(of, draft, drafted)
    asked = questions.served_by(
        of, engine=engine, memory_ratio=memory_ratio, prefill_replicas=prefill_replicas,
        calibration=questions.server_calibration(calibration),
    )  # fmt: skip
    load = RequestLoad(
        input_tokens=input_tokens, output_tokens=output_tokens, prefix_hit_rate=prefix_hit_rate or 0.0,
        input_spread=input_spread or 0.0, output_spread=output_spread or 0.0,
        drafted_per_step=drafted, accepted_per_step=accepted, lockstep=lockstep,
    )  # fmt: skip
    if requests_per_s is not None:
        under = estimate_arrivals(asked, load, arrivals or "poisson", requests_per_s, bounds=bounds, seed=seed)
        found = [estimate_rate(asked, load, requests_per_s, under.simulated)]
    else:
        closed = [replace(load, concurrency=number) for number in concurrency] or [load]
        found = [estimate_load(asked, one) for one in closed]
    return ServingEstimate(
        server=asked, loads=found, arrivals=under,
        price=questions.hour_price(terms or questions.PriceTerms(), of.cluster.accelerator),
        notes=(*_waiting(found), *questions.notes_of(of, asked.engine, [load], name=model, precision=precision)),
    )  # fmt: skip


def _in_flight(found: LoadEstimate) -> str:
    """Requests in flight, beside those asked for where they are more than fit."""
    if found.waiting:
        return f"{found.most_in_flight:,.0f} of {found.load.concurrency:,.0f} asked"
    return f"{found.in_flight:,.0f}"


def _waiting(loads: Sequence[LoadEstimate]) -> list[str]:
    return [
        f"{found.load.concurrency:,.0f} requests in flight are asked for and {found.most_in_flight:,.0f} fit (bound by "
        f"{found.limit.binds}): the others wait, and TTFT counts it"
        for found in loads
        if found.waiting
    ]
