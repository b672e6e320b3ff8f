"""Prefetch batches with background threads, whose number is measured.

Threads are enough: workers copy from memory-mapped files, and NumPy releases the interpreter lock meanwhile.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH_PER_WORKER = 2  # batches that wait, so that one slow read does not stop the step
INLINE_SHARE = 0.01  # reading that costs less of a step than this needs no thread
NEARLY_AS_FAST = 0.9
FIRST_WORKERS = 1  # before anything was measured


def prefetch(read: Callable[[int], T], *, start: int, stop: int | None, num_workers: int) -> Generator[T, None, None]:
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
    """Number of threads, with the measured time of a batch for each number that was tried.

    A number from the run file has no measured times.
    """

    num_workers: int
    step_s: float | None  # that they must keep up with
    batch_s: dict[int, float]


class ReadAhead(Generic[T]):
    """`at(number)` is `read(number)`; consecutive numbers are prefetched. The number of threads changes no result.

    `num_workers` sets the number of threads. Without it one thread begins; after `num_steps` batches the time between
    them (its `summary`, the median) is the step that reading must keep up with, and `measure_workers` chooses the
    number.

    Nothing at or beyond `stop` is read: the threads end with the last batch before it.
    """

    def __init__(
        self, read: Callable[[int], T], *, num_workers: int | None = None, stop: int | None = None, num_steps: int = 4
    ) -> None:
        self.read = read
        self.stop = stop
        self.num_steps = num_steps
        self.summary: Callable[[list[float]], float] = statistics.median
        self.choice: WorkerChoice | None = None  # None: not measured yet
        if num_workers is not None:
            self.choice = WorkerChoice(num_workers=num_workers, step_s=None, batch_s={})
        self._reading: Generator[T, None, None] | None = None
        self._next = -1
        self._used_s: list[float] = []
        self._given_s = 0.0

    def at(self, number: int) -> T:
        """The batch of this number."""
        in_order = number == self._next and self._reading is not None
        if in_order and self.choice is None:
            self._used_s.append(time.perf_counter() - self._given_s)
            if len(self._used_s) >= self.num_steps:
                step_s = self.summary(self._used_s)
                self.choice = measure_workers(self.read, step_s=step_s, start=number)
                in_order = self.choice.num_workers == FIRST_WORKERS
        if not in_order:  # read again from here
            self.close()
            num_workers = FIRST_WORKERS if self.choice is None else self.choice.num_workers
            self._reading = prefetch(self.read, start=number, stop=self.stop, num_workers=num_workers)
        assert self._reading is not None
        batch = next(self._reading)
        self._next, self._given_s = number + 1, time.perf_counter()
        if self._next == self.stop:
            self.close()
        return batch

    def close(self) -> None:
        """End the threads. `at` starts them again."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None


def measure_workers(
    read: Callable[[int], object],
    *,
    step_s: float | None = None,
    candidates: tuple[int, ...] = (0, 1, 2, 4, 8),
    num_batches: int = 4,
    start: int = 0,
) -> WorkerChoice:
    """Measure the fewest threads that keep up with a step of `step_s` seconds; None: that are nearly as fast as any.

    Without a thread, reading adds to the step, so 0 is chosen only where reading is a hundredth of the step. The first
    count that keeps up ends the search. Each candidate reads other batches, which no earlier one has brought into
    memory.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    batch_s: dict[int, float] = {}
    for place, num_workers in enumerate(n for n in candidates if n <= num_cores):
        first = start + place * num_batches
        before_s = time.perf_counter()
        for _ in prefetch(read, start=first, stop=first + num_batches, num_workers=num_workers):
            pass
        batch_s[num_workers] = (time.perf_counter() - before_s) / num_batches
        if step_s is not None and _keeps_up(num_workers, batch_s[num_workers], step_s):
            break
    return WorkerChoice(num_workers=_fewest(batch_s, step_s), step_s=step_s, batch_s=batch_s)


def _keeps_up(num_workers: int, batch_s: float, step_s: float) -> bool:
    return batch_s <= step_s * (INLINE_SHARE if num_workers == 0 else NEARLY_AS_FAST)


def _fewest(batch_s: dict[int, float], step_s: float | None) -> int:
    """
    >>> times = {0: 1.0, 1: 1.0, 2: 0.5, 4: 0.48}
    >>> [_fewest(times, step_s) for step_s in (200, 2, 0.7, None)]
    [0, 1, 2, 2]
    """
    if step_s is not None:
        for num_workers, seconds in batch_s.items():
            if _keeps_up(num_workers, seconds, step_s):
                return num_workers
    fastest_s = min(batch_s.values())
    threads = {n: seconds for n, seconds in batch_s.items() if n > 0} or batch_s
    nearly_as_fast = (n for n, seconds in threads.items() if seconds * NEARLY_AS_FAST <= fastest_s)
    return next(nearly_as_fast, min(threads, key=lambda n: threads[n]))
