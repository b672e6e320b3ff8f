"""Loads over their repeats: medians with intervals, and the best load under a bound of latency.

A value of a load is the median over its repeats, with the 95 % interval of order statistics from six repeats on and
their range below. Token counts and requests are sums over the repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from meshwright.records.measurement import ValueRange, value_range
from meshwright.records.serving import LATENCIES, Latency, Load, ServingPoint, sum_known

RATES = (
    "requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s",
    "steady_output_tokens_per_s", "steady_total_tokens_per_s", "good_requests_per_s", "good_ratio",
    "mean_in_flight", "littles_law_ratio", "tokens_per_chunk", "chunks_per_s", "wall_s",
    "server_wait_ratio", "server_running", "server_waiting", "server_cache_usage", "server_hit_ratio",
)  # fmt: skip
COUNTS = (
    "num_requests", "num_ok", "num_reconnects", "num_malformed_events", "num_short", "input_tokens", "output_tokens",
    "total_tokens", "lost_output_tokens", "reasoning_tokens", "num_retries", "cached_tokens",
    "server_preemptions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """One load. `points` are its repeats, in order."""

    load: Load
    points: tuple[ServingPoint, ...]

    @property
    def usable(self) -> tuple[ServingPoint, ...]:
        """Repeats that were measured and not refused."""
        return tuple(p for p in self.points if p.is_usable)

    @property
    def refusal(self) -> str:
        """Reason why no repeat can be used; empty if one can."""
        return "" if self.usable else next((p.refusal for p in self.points if p.refusal), "no request succeeded")

    @property
    def errors(self) -> Mapping[str, int]:
        """Failed requests of all repeats by status."""
        return sum((Counter(p.errors) for p in self.points), Counter())

    @property
    def http_statuses(self) -> Mapping[str, int]:
        """Requests of all repeats that ended with an HTTP status other than 200, by that status."""
        return sum((Counter(p.http_statuses) for p in self.points), Counter())

    def total(self, name: str) -> int:
        """Sum of a count over all repeats."""
        return sum(getattr(p, name) for p in self.points)

    def value(self, name: str) -> ValueRange | None:
        """A rate over the usable repeats; None where no repeat has it."""
        return value_range(getattr(p, name) for p in self.usable)

    def latency(self, name: str, part: str = "median") -> ValueRange | None:
        """One statistic of a latency over the usable repeats."""
        found = [getattr(p, name) for p in self.usable]
        return value_range(getattr(x, part) for x in found if x is not None)

    def document(self) -> dict[str, Any]:
        """Return all values for JSON: medians over the repeats, and `ranges` of values that vary."""
        ranged = {name: self.value(name) for name in RATES}
        parts = [f.name for f in fields(Latency) if f.name != "n"]
        latencies: dict[str, Any] = {}
        for name in LATENCIES:
            sizes = [getattr(p, name).n for p in self.usable if getattr(p, name) is not None]
            values = {part: self.latency(name, part) for part in parts}
            latencies[name] = {"n": sum(sizes)} | {part: v and v.value for part, v in values.items()} if sizes else None
            ranged[f"{name}.median"] = values["median"]
        load = {f.name: getattr(self.load, f.name) for f in fields(Load)}
        return {
            **load,
            "load": self.load.name,
            "num_repeats": len(self.points),
            "refusal": self.refusal or None,
            "interrupted": any(p.interrupted for p in self.points),
            "token_source": ", ".join(dict.fromkeys(p.token_source for p in self.points)),
            "errors": self.errors,
            "http_statuses": self.http_statuses,
            "num_failed": sum(self.errors.values()),
            **{name: sum_known(getattr(p, name) for p in self.points) for name in COUNTS},
            **{name: None if v is None else v.value for name, v in ranged.items() if "." not in name},
            "peak_in_flight": max((p.peak_in_flight for p in self.points), default=0),
            "client_ceiling_chunks_per_s": self.points[0].client_ceiling_chunks_per_s if self.points else None,
            **latencies,
            "ranges": {n: v for n, v in ranged.items() if v is not None} if len(self.usable) > 1 else {},
        }


def summaries(points: Sequence[ServingPoint]) -> list[LoadSummary]:
    """Summaries of all loads, in order of their first measurement."""
    loads = dict.fromkeys(p.load for p in points)
    return [LoadSummary(load=load, points=tuple(p for p in points if p.load == load)) for load in loads]


# --- the best load under a bound of latency ---


class InterTokenDefinition(StrEnum):
    """Definition of inter-token latency by which loads are judged."""

    TPOT = "tpot_s"  # median over requests of the time per output token
    CHUNK_GAP = "chunk_gap_s"  # median over all chunk gaps of all requests


@dataclass(frozen=True, kw_only=True)
class BoundStep:
    """The best load for every bound above `above_s`, up to the next step."""

    above_s: float  # the load's median latency: a bound must be larger
    total_tokens_per_s: float
    output_tokens_per_s: float
    load: Load


def best_by_bound(found: Sequence[LoadSummary], definition: InterTokenDefinition) -> list[BoundStep]:
    """Best total tokens/s among loads with a median inter-token latency under n, as a step function of n.

    This is the procedure of the MI355X study (Signal65, June 2025, "Metric Calculation"): loads are not interpolated.
    Loads in which a request failed are left out: its absence made the others faster.
    """
    rows = []
    for summary in found:
        if summary.errors:
            continue
        itl, total = summary.latency(definition), summary.value("total_tokens_per_s")
        output = summary.value("output_tokens_per_s")
        if itl is not None and total is not None and output is not None:
            rows.append(
                BoundStep(
                    above_s=itl.value,
                    total_tokens_per_s=total.value,
                    output_tokens_per_s=output.value,
                    load=summary.load,
                )
            )
    steps: list[BoundStep] = []
    for row in sorted(rows, key=lambda row: (row.above_s, -row.total_tokens_per_s)):
        if not steps or row.total_tokens_per_s > steps[-1].total_tokens_per_s:
            steps.append(row)
    return steps


def best_under(steps: Sequence[BoundStep], bound_s: float) -> BoundStep | None:
    """The step that holds for a bound; None when no load is under it."""
    return max(
        (step for step in steps if step.above_s < bound_s), key=lambda step: step.total_tokens_per_s, default=None
    )


@dataclass(frozen=True, kw_only=True)
class MedianBounds:
    """Bounds of a load: its median first token and its median inter-token latency."""

    itl_s: float | None = None
    ttft_s: float | None = None
    definition: InterTokenDefinition = InterTokenDefinition.TPOT

    def holds(self, summary: LoadSummary) -> bool:
        """Return True if the load was measured, no request failed, and it is under all bounds."""
        limits = ((self.definition.value, self.itl_s), ("ttft_s", self.ttft_s))
        if not summary.usable or summary.errors:
            return False
        for name, limit in limits:
            found = summary.latency(name)
            if limit is not None and found is not None and found.value >= limit:
                return False
        return True


async def search_concurrency(
    measure: Callable[[int], Any], holds: Callable[[LoadSummary], bool], *, most: int
) -> int | None:
    """Find the largest concurrency under a bound: doubling, then bisection. None: even one request breaks it.

    `measure` is awaited with a concurrency and returns its summary. Latency is taken to grow with the load.
    """
    good, bad, candidate = 0, most + 1, 1
    while good < most and candidate < bad:
        if holds(await measure(candidate)):
            good, candidate = candidate, min(2 * candidate, most)
        else:
            bad = candidate
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(await measure(middle)):
            good = middle
        else:
            bad = middle
    return good or None
