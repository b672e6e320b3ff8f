"""Speed of the pipeline simulation and of its closed forms, on one core.

    python benchmarks/pipeline_simulation.py [--repeat 5]

For each shape: the time to build the event graph (once per shape, then cached) and to simulate one plan. Then the
closed forms on a million plans. The best of the repeats counts, which excludes other load of the machine. It takes
a few seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from meshwright.cost.pipeline.closed_form import in_flight, waiting_s
from meshwright.cost.pipeline.graph import event_graph
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import StageTimes, simulate
from meshwright.specs.plan import SCHEDULES, Schedule

SIZES = [
    (Schedule.ONE_F_ONE_B, 8, 1, 64),
    (Schedule.INTERLEAVED, 16, 5, 64),
    (Schedule.DUALPIPE, 16, 1, 64),
    (Schedule.ZBV, 48, 2, 128),
    (Schedule.INTERLEAVED, 48, 4, 128),
    (Schedule.ZERO_BUBBLE, 64, 1, 512),
]
TARGET_MS = {(16, 5, 64): 10.0, (48, 4, 128): 60.0}  # of one plan
NUM_ROWS = 1_000_000


def best_s(function: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - start_s)
    return min(times)


def build(shape: PipelineShape) -> None:
    event_graph.cache_clear()
    event_graph(shape)


def measure(schedule: Schedule, p: int, v: int, m: int, *, repeat: int) -> str:
    shape = PipelineShape(schedule=schedule, num_ranks=p, num_chunks=v, num_micro_batches=m)
    rng = np.random.default_rng(0)
    f, b, w = rng.uniform(0.5, 1.5, (3, shape.num_stages))
    one = StageTimes(forward_s=f, backward_input_s=b, backward_weight_s=w, transfer_s=0.01)
    build_s = best_s(lambda: build(shape), repeat)
    one_s = best_s(lambda: simulate(shape, one), repeat)
    num_ops = event_graph(shape).num_ops
    target = TARGET_MS.get((p, v, m))
    verdict = "" if target is None else f"  target {target:.0f} ms: {'met' if 1e3 * one_s < target else 'MISSED'}"
    return (
        f"{schedule.value:12} {p:3} {v:3} {m:5} {num_ops:8,} {1e3 * build_s:9.1f} {1e3 * one_s:9.2f}"
        f" {num_ops / one_s / 1e6:10.1f}{verdict}"
    )


def screening(repeat: int) -> list[str]:
    rng = np.random.default_rng(0)
    schedule = rng.integers(0, len(SCHEDULES), NUM_ROWS)
    p = 2 ** rng.integers(1, 6, NUM_ROWS)
    v = 2 ** rng.integers(0, 3, NUM_ROWS)
    m = p * rng.integers(2, 9, NUM_ROWS)
    f, b, w, x = rng.uniform(0.5, 1.5, (4, NUM_ROWS))
    functions: dict[str, Callable[[], object]] = {
        "waiting_s": lambda: waiting_s(
            schedule, p, v, m, forward_s=f, backward_input_s=b, backward_weight_s=w, transfer_s=x
        ),
        "in_flight": lambda: in_flight(schedule, p, v, m, 0),
    }
    return [
        f"{name:14} {NUM_ROWS / best_s(function, repeat) / 1e6:6.1f} million plans/s"
        for name, function in functions.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print("schedule       p   v     m      ops  build ms    one ms     Mops/s")
    for size in SIZES:
        print(measure(*size, repeat=repeat))
    print("\nscreening, all schedules mixed:")
    print(*screening(repeat), sep="\n")


if __name__ == "__main__":
    main()
