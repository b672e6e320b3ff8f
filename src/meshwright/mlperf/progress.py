"""Lines of progress of a set: runs that ended, and how far the others are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.convergence import reference_points
from meshwright.mlperf.prospects import prospect
from meshwright.mlperf.run_log import SUCCESS
from meshwright.mlperf.run_set import RunResult, RunSet, RunState
from meshwright.units import format_duration


class SetProgress:
    """Says each run that ends at once, and how far the others are now and then."""

    def __init__(
        self, benchmark: Benchmark, held: RunSet, *, global_batch: int, say: Callable[[str], None], every_s: float
    ) -> None:
        self.global_batch = global_batch
        self.benchmark, self.held, self.say, self.every_s = benchmark, held, say, every_s
        self.said: set[int] = set()
        self.last_s = 0.0
        self.is_first = True

    def report(self, done: dict[int, RunResult], active: list[RunState]) -> None:
        """Called with the runs that have ended, earlier commands' included, and the runs under way."""
        if self.is_first and done:
            self.say(f"{len(done)} of {self.held.num_runs} runs had ended before")
            self.said |= {result.index for result in done.values() if result.index not in {s.index for s in active}}
        self.is_first = False
        for index in sorted(set(done) - self.said):
            self.said.add(index)
            self.say(self._ended(done[index], num_done=len(done)) + self._prospect(done))
        if active and time.monotonic() - self.last_s >= self.every_s:
            self.last_s = time.monotonic()
            self.say(self._under_way(done, active))

    def _ended(self, result: RunResult, *, num_done: int) -> str:
        word = "reached" if result.status == "success" else "did not reach"
        return (
            f"run {result.index} ({num_done} of {self.held.num_runs}): {word} {self.benchmark.target:g} with "
            f"{result.loss:.4f} after {result.samples:,} samples in {format_duration(result.seconds)}"
        )

    def _prospect(self, done: dict[int, RunResult]) -> str:
        """Probability that a whole set passes the reference-convergence test."""
        if self.held.num_runs != self.benchmark.runs or not reference_points(self.benchmark):
            return ""
        samples = [r.samples if r.status == SUCCESS else None for r in done.values()]
        found = prospect(self.benchmark, samples, global_batch_size=self.global_batch)
        if found.problem:
            return f"; the set does not pass: {found.problem}"
        return f"; the set passes reference convergence with {100 * found.probability:.0f} %"

    def _under_way(self, done: dict[int, RunResult], active: list[RunState]) -> str:
        each = "; ".join(
            f"run {state.index} "
            + ("starts" if state.loss is None else f"{state.samples:,} samples, loss {state.loss:.4f}")
            for state in active
        )
        return f"{each}; target {self.benchmark.target:g}{self._left(done, active)}"

    def _left(self, done: dict[int, RunResult], active: list[RunState]) -> str:
        """The time that is left, from the runs that have ended."""
        if not done:
            return ""
        usual_s = statistics.median(result.seconds for result in done.values())
        left = self.held.num_runs - len(done)
        elapsed_s = sum(min(state.seconds, usual_s) for state in active)
        left_s = max(0.0, (left * usual_s - elapsed_s) / max(1, self.held.num_concurrent))
        return f"; about {format_duration(left_s)} left"
