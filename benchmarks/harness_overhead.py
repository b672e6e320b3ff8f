"""Overhead of the harness of `bench`: in the measured seconds, and of one measurement.

    python benchmarks/harness_overhead.py [--repeat 9]

added     median of the harness for a loop of known length, over the same loop timed by hand; 1 is no overhead.
          Both are interleaved, so that a busy moment of the machine affects them equally
cost      time of the call of `measure`, over the seconds of the samples that it kept

It takes about ten seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from meshwright.bench.harness import measure

LOOPS = (0, 100, 10_000, 1_000_000)


def work(num_turns: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(num_turns):
            pass

    return run


def by_hand_s(run: Callable[[], None], *, calls: int, repeat: int) -> float:
    samples = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        for _ in range(calls):
            run()
        samples.append((time.perf_counter() - start_s) / calls)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat
    print(f"{'turns':>9} {'call':>10} {'samples':>8} {'added':>7} {'cost':>6}")
    for num_turns in LOOPS:
        run, added, cost = work(num_turns), [], []
        for _ in range(repeat):
            start_s = time.perf_counter()
            found = measure(run, budget_s=0.5)
            wall_s = time.perf_counter() - start_s
            added.append(found.median / by_hand_s(run, calls=found.calls, repeat=found.n))
            cost.append(wall_s / (sum(found.seconds) * found.calls))
        print(
            f"{num_turns:>9,} {found.median * 1e6:>8.3f}us {found.n:>8} {statistics.median(added):>7.3f} "
            f"{statistics.median(cost):>6.2f}"
        )


if __name__ == "__main__":
    main()
