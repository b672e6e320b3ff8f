"""Seconds of a callable: median and interval.

1. Two warm-up calls are not kept: the first picks kernels and touches pages, the second gives the time of one call. If
   the first already takes the whole budget, there is no second.
2. Calls that are too short for the clock are repeated within one sample.
3. Samples are taken until the 95 % interval of the median is narrow, or the budget is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from meshwright.errors import MeshwrightError
from meshwright.records.measurement import Measurement

TARGET_RATIO = 0.03
"""A measurement ends when its interval reaches at most this share of the median to either side."""

BUDGET_S = 2.0
LEAST_SAMPLE_S = 1e-3
MAX_CALLS = 10_000  # in one sample
MAX_SAMPLES = 400


class AbsurdClockError(MeshwrightError):
    """The clock went backwards, stood still, or is not finite."""

    exit_code = 1


def rounds(*, least: int, most: int, budget_s: float) -> Iterator[int]:
    """Yield numbers of rounds: 0 is a warm-up, `least` others come, and more up to `most` while the budget lasts."""
    begin_s = time.perf_counter()
    for number in range(1 + most):
        if number > least and time.perf_counter() - begin_s > budget_s:
            return
        yield number


def _nothing() -> None: ...


def _same(seconds: float) -> float:
    return seconds


def measure(
    run: Callable[[], object],
    *,
    before: Callable[[], object] | None = None,
    synchronize: Callable[[], object] = _nothing,
    agree: Callable[[float], float] = _same,
    clock: Callable[[], float] = time.perf_counter,
    target_ratio: float = TARGET_RATIO,
    budget_s: float = BUDGET_S,
) -> Measurement:
    """Time `run` until its median is known to `target_ratio`, or `budget_s` is over.

    `before` runs ahead of every call and is not timed. `synchronize` waits for the device. `agree` maps the
    seconds of this process to the largest seconds of all processes of a collective, so that all stop
    together. Raises AbsurdClockError when a duration is not above zero, and whatever `run` raises.
    """

    def sample_s(calls: int) -> float:
        if before is not None:
            before()
        synchronize()
        start_s = clock()
        for _ in range(calls):
            run()
        synchronize()
        end_s = clock()
        seconds = end_s - start_s
        if not (math.isfinite(seconds) and seconds >= 0):
            raise AbsurdClockError(f"the clock went from {start_s!r} to {end_s!r} s: nothing can be measured")
        return agree(seconds)

    spent_s = sample_s(1)
    call_s = spent_s
    if spent_s < budget_s:
        call_s = sample_s(1)
        spent_s += call_s
    calls = 1 if before is not None else _calls_a_sample(call_s)
    samples: list[float] = []
    while True:
        total_s = sample_s(calls)
        if total_s <= 0:
            raise AbsurdClockError(f"the clock stood still during {calls} calls: nothing can be measured")
        samples.append(total_s / calls)
        spent_s += total_s
        found = Measurement(seconds=tuple(samples), calls=calls, target_ratio=target_ratio)
        if found.is_narrow or spent_s >= budget_s or found.n >= MAX_SAMPLES:
            return found


def _calls_a_sample(call_s: float) -> int:
    return min(MAX_CALLS, max(1, round(LEAST_SAMPLE_S / max(call_s, LEAST_SAMPLE_S / MAX_CALLS))))
