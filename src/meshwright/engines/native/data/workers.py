"""Reading ahead in the background, and how many threads that takes, by measurement.

Threads are enough: what a worker does is copy from memory-mapped files, and NumPy lets go of the interpreter lock
meanwhile.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

T = TypeVar("T")

DEPTH_PER_WORKER = 2  # batches that wait, so that one slow read does not stop the step
INLINE_SHARE = 0.01  # reading that costs less of a step than this needs no thread
NEARLY_AS_FAST = 0.9


def prefetch(read: Callable[[int], T], *, start: int, stop: int | None, num_workers: int) -> Iterator[T]:
    """`read(start)`, `read(start + 1)`, ... in order, up to `stop`; 0 workers read when asked.

    An error in `read` is raised where its result would have been. Closing the iterator stops the threads.
    """
    numbers = count(start) if stop is None else iter(range(start, stop))
    if num_workers == 0:
        yield from map(read, numbers)
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")
    waiting: deque[Future[T]] = deque()
    try:
        for number in islice(numbers, num_workers * DEPTH_PER_WORKER):
            waiting.append(pool.submit(read, number))
        while waiting:
            result = waiting.popleft().result()
            for number in islice(numbers, 1):
                waiting.append(pool.submit(read, number))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class WorkerChoice:
    """How many threads, and why: the measured time of a batch with each number of them."""

    num_workers: int
    batch_s: dict[int, float]


def measure_workers(
    read: Callable[[int], object],
    *,
    step_s: float | None = None,
    candidates: tuple[int, ...] = (0, 1, 2, 4),
    num_batches: int = 8,
    start: int = 0,
) -> WorkerChoice:
    """The fewest threads that keep up with a step of `step_s` seconds; not known: that are nearly as fast as any.

    Without a thread, reading adds to the step, so that is chosen only where it is a hundredth of it. Each candidate
    reads other batches, so that none profits from what the last one brought into memory.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    batch_s: dict[int, float] = {}
    for place, num_workers in enumerate(n for n in candidates if n <= num_cores):
        first = start + place * num_batches
        before_s = time.perf_counter()
        for _ in prefetch(read, start=first, stop=first + num_batches, num_workers=num_workers):
            pass
        batch_s[num_workers] = (time.perf_counter() - before_s) / num_batches
    return WorkerChoice(num_workers=_fewest(batch_s, step_s), batch_s=batch_s)


def _fewest(batch_s: dict[int, float], step_s: float | None) -> int:
    """
    >>> times = {0: 1.0, 1: 1.0, 2: 0.5, 4: 0.48}
    >>> [_fewest(times, step_s) for step_s in (200, 2, 0.7, None)]
    [0, 1, 2, 2]
    """
    if step_s is not None:
        for num_workers, seconds in batch_s.items():
            if seconds <= step_s * (INLINE_SHARE if num_workers == 0 else NEARLY_AS_FAST):
                return num_workers
    fastest_s = min(batch_s.values())
    threads = {n: seconds for n, seconds in batch_s.items() if n > 0} or batch_s
    nearly_as_fast = (n for n, seconds in threads.items() if seconds * NEARLY_AS_FAST <= fastest_s)
    return next(nearly_as_fast, min(threads, key=lambda n: threads[n]))
