"""Tuning of the number of data-loading workers, separately for training and validation (docs/guides/tune-a-run.md).

A visit of a count first reads `num_batches` without pause, which gives the rate, and then some with a consumer that
works for the time of a step. On a CPU the consumer runs GEMMs on the cores that the readers use too, as training would.
A long step is shortened to `LONG` times the reading of a batch: readers that keep up with this keep up with the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from meshwright.bench.harness import rounds
from meshwright.errors import InputError
from meshwright.records.measurement import Measurement
from meshwright.training.data import Batches, ReadAhead
from meshwright.training.data.workers import DEPTH_PER_WORKER, INLINE_SHARE, NEARLY_AS_FAST, prefetch

FORWARD_SHARE = 1 / 3
"""Work of a validation step over work of a training step: 2 of 6 FLOPs per parameter and token."""

LEAST_ROUNDS, MAX_ROUNDS = 3, 15
LONG = 4.0
LEAST_WORK_S = 0.02
LEAST_READ_S = 0.05  # of reading in one visit, if the budget allows it
MAX_BATCHES = 512
NUM_STEPS = 6  # simulated in one visit
WORK_SIZE = 192  # of the square GEMMs of the consumer

Work = Callable[[float], object]
Advance = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The consumer of the batches."""

    step_s: float | None  # None: unknown
    source: str
    on_host: bool  # the step uses the cores that read


@dataclass(frozen=True, kw_only=True)
class LoaderCandidate:
    """Measurements with one number of workers. Times are of one process; `rate` is in tokens/s."""

    num_workers: int
    first_s: Measurement  # from the start of the workers to the first batch
    batch_s: Measurement  # in isolation; of a validation without its start and the consumer
    wait_s: Measurement  # of one step; of a validation its whole pass with the start
    tokens_per_batch: int
    held_bytes: int  # of prefetched batches

    @property
    def rate(self) -> float:
        """Tokens/s in isolation."""
        return self.tokens_per_batch / self.batch_s.median


@dataclass(frozen=True, kw_only=True)
class LoaderChoice:
    """The measured counts, the best one, and the reason."""

    candidates: tuple[LoaderCandidate, ...]
    num_workers: int
    reason: str
    num_batches: int  # read in one visit
    pass_batches: int | None = None  # of a validation: batches of a whole pass


@contextmanager
def _readable() -> Iterator[None]:
    """Turn an OSError of the disk into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the data can no longer be read ({error.strerror or error})", got=str(error.filename or "data")
        ) from error


@_readable()
def tune_training(
    batches: Batches, counts: Sequence[int], demand: Demand, *, budget_s: float, advance: Advance = lambda seconds: None
) -> LoaderChoice:
    """Find the fewest workers with which a step does not wait. Raises InputError if the data can no longer be read."""
    one_s = _time(lambda: batches.at(0))
    consumer_s = _consumer_s(demand.step_s, one_s)
    visit_s = budget_s / ((1 + LEAST_ROUNDS) * len(counts))
    wanted = max(4 * max(1, *counts), math.ceil(LEAST_READ_S / one_s))
    num_batches = min(MAX_BATCHES, max(4, min(wanted, int((visit_s - NUM_STEPS * consumer_s) / one_s))))
    work = _work(demand)
    place = 1

    def visit(num_workers: int) -> tuple[float, float, float]:
        nonlocal place
        first = place
        place += num_batches + NUM_STEPS + 1
        start_s = time.perf_counter()
        reading = prefetch(batches.at, start=first, stop=first + num_batches, num_workers=num_workers)
        next(reading)
        first_s = time.perf_counter() - start_s
        for _ in reading:
            pass
        batch_s = (time.perf_counter() - start_s) / num_batches
        first += num_batches
        reading = prefetch(batches.at, start=first, stop=first + NUM_STEPS + 1, num_workers=num_workers)
        next(reading)
        waited_s = 0.0
        for _ in range(NUM_STEPS):
            work(consumer_s)
            waited_s += _time(lambda: next(reading))
        reading.close()
        return first_s, batch_s, waited_s / NUM_STEPS

    candidates = _visited(visit, counts, batches, budget_s=budget_s, advance=advance)
    return _enough(candidates, demand, num_batches=num_batches)


@_readable()
def tune_validation(
    batches: Batches,
    counts: Sequence[int],
    demand: Demand,
    *,
    pass_batches: int,
    budget_s: float,
    advance: Advance = lambda seconds: None,
) -> LoaderChoice:
    """Find the fewest workers with which a pass is as short as with any number.

    A pass too long for the budget is measured by its first batches. Raises as `tune_training`.
    """
    forward_s = None if demand.step_s is None else demand.step_s * FORWARD_SHARE
    one_s = _time(lambda: batches.at(0))
    consumer_s = _consumer_s(forward_s, one_s)
    visit_s = budget_s / ((1 + LEAST_ROUNDS) * len(counts))
    num_batches = min(pass_batches, max(2, int(visit_s / (one_s + consumer_s))))
    work = _work(demand)

    def visit(num_workers: int) -> tuple[float, float, float]:
        start_s = time.perf_counter()
        ahead = ReadAhead(batches.at, num_workers=num_workers, stop=num_batches)
        ahead.at(0)
        first_s = time.perf_counter() - start_s
        rest_s = 0.0
        try:
            for number in range(1, num_batches):
                work(consumer_s)
                rest_s += _time(lambda: ahead.at(number))  # noqa: B023  (called at once)
        finally:
            closing_s = _time(ahead.close)
        batch_s = rest_s / max(1, num_batches - 1)
        return first_s, batch_s, first_s + batch_s * (pass_batches - 1) + closing_s

    candidates = _visited(visit, counts, batches, budget_s=budget_s, advance=advance)
    return _shortest(candidates, forward_s, num_batches=num_batches, pass_batches=pass_batches)


def _visited(
    visit: Callable[[int], tuple[float, float, float]],
    counts: Sequence[int],
    batches: Batches,
    *,
    budget_s: float,
    advance: Advance,
) -> tuple[LoaderCandidate, ...]:
    """Visit all counts round after round, starting each round with another count, until the budget is over."""
    found: dict[int, list[tuple[float, float, float]]] = {n: [] for n in counts}
    for round_ in rounds(least=LEAST_ROUNDS, most=MAX_ROUNDS, budget_s=budget_s):
        before_s = time.perf_counter()
        start = round_ % len(counts)
        for num_workers in [*counts[start:], *counts[:start]]:
            times = visit(num_workers)
            if round_:
                found[num_workers].append(times)
        advance(time.perf_counter() - before_s)
    sample = batches.at(0)
    return tuple(
        LoaderCandidate(
            num_workers=n,
            first_s=Measurement(seconds=first),
            batch_s=Measurement(seconds=batch),
            wait_s=Measurement(seconds=wait),
            tokens_per_batch=sample.tokens_BT.numel(),
            held_bytes=n * DEPTH_PER_WORKER * sample.num_bytes,
        )
        for n, times in found.items()
        for first, batch, wait in [zip(*times, strict=True)]
    )


def _time(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def _consumer_s(work_s: float | None, one_s: float) -> float:
    """Seconds that the consumer works between two batches."""
    return 0.0 if work_s is None else min(work_s, max(LEAST_WORK_S, LONG * one_s))


def _work(demand: Demand) -> Work:
    """Return a function that works for a given number of seconds."""
    if not demand.on_host:
        return time.sleep
    matrix = torch.ones(WORK_SIZE, WORK_SIZE)

    def multiply(seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            matrix @ matrix  # pyright: ignore[reportUnusedExpression]

    return multiply


# --- choice ---


def _enough(candidates: tuple[LoaderCandidate, ...], demand: Demand, *, num_batches: int) -> LoaderChoice:
    def chosen(candidate: LoaderCandidate, reason: str) -> LoaderChoice:
        return LoaderChoice(
            candidates=candidates, num_workers=candidate.num_workers, reason=reason, num_batches=num_batches
        )

    if demand.step_s is None:
        fastest_s = min(c.batch_s.median for c in candidates)
        first = next(c for c in candidates if c.batch_s.median * NEARLY_AS_FAST <= fastest_s)
        return chosen(first, "the step's time is not known: the fewest that are nearly as fast as any")
    for c in candidates:
        if keeps_up(c, demand.step_s):
            return chosen(c, f"the fewest with which a step waits less than {INLINE_SHARE:.0%} of its time")
    best = min(candidates, key=lambda c: c.wait_s.median)
    tied = next(c for c in candidates if c.wait_s.median <= best.wait_s.interval[1])
    return chosen(tied, "no count keeps up with the step: the fewest that wait as little as any")


def keeps_up(candidate: LoaderCandidate, step_s: float) -> bool:
    """Return True if steps wait less than a hundredth of their time and isolated reading is faster than the steps."""
    is_fast = candidate.num_workers == 0 or candidate.batch_s.median <= NEARLY_AS_FAST * step_s
    return is_fast and candidate.wait_s.median <= INLINE_SHARE * step_s


def _shortest(
    candidates: tuple[LoaderCandidate, ...], forward_s: float | None, *, num_batches: int, pass_batches: int
) -> LoaderChoice:
    """Choose the fewest workers. Passes that differ by less than the interval, or by a hundredth, count as equal."""
    work_s = (forward_s or 0.0) * pass_batches
    best = min(candidates, key=lambda c: c.wait_s.median)
    limit_s = max(best.wait_s.interval[1], best.wait_s.median + INLINE_SHARE * (work_s + best.wait_s.median))
    first = next(c for c in candidates if c.wait_s.median <= limit_s)
    return LoaderChoice(
        candidates=candidates,
        num_workers=first.num_workers,
        reason="the fewest with which a pass is as short as with any",
        num_batches=num_batches,
        pass_batches=pass_batches,
    )


def usual_counts(num_cores: int) -> tuple[int, ...]:
    """0, 1 and the powers of 2 up to the cores that one process has.

    >>> usual_counts(1), usual_counts(6)
    ((0, 1), (0, 1, 2, 4))
    """
    return (0, *(2**power for power in range(max(1, num_cores).bit_length())))
