"""Exchanges between local processes: every process takes part in all points and goes by the slowest one's seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.bench.harness import measure
from meshwright.bench.points import Point
from meshwright.bench.records import Recorder, row_of
from meshwright.engines.native.device import synchronize

# Renamed in PyTorch 2.13.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """What each process is told. Pickles."""

    points: tuple[Point, ...]
    recorder: Recorder  # rank 0 writes with it
    device_type: str
    budget_s: float
    point_s: float


def measure_exchanges(rank: int, num_ranks: int, told: Exchanges) -> None:
    """Measure the points in turn until the time is spent."""
    device = torch.device(told.device_type, rank) if told.device_type == "cuda" else torch.device("cpu")
    start_s = time.perf_counter()

    def largest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    for point in told.points:
        if largest(time.perf_counter() - start_s) > told.budget_s:
            return
        found = measure(
            _call(point, device),
            synchronize=lambda: synchronize(device),
            agree=largest,
            budget_s=told.point_s,
        )
        if rank == 0:
            told.recorder.append(row_of(point, found))


def _call(point: Point, device: torch.device) -> Callable[[], object]:
    """The collective on bytes; `size_bytes` is the whole buffer, of which each rank holds or gets its part."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    part = point.size_bytes // num_ranks // 4
    whole = torch.ones(part * num_ranks, device=device)
    mine, other = torch.ones(part, device=device), torch.empty(part * num_ranks, device=device)
    match point.kernel:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX)  # sums would grow to infinity
        case "all_gather":
            return lambda: ALL_GATHER(whole, mine)
        case "reduce_scatter":
            return lambda: REDUCE_SCATTER(mine, whole, op=dist.ReduceOp.MAX)
        case "all_to_all":
            return lambda: dist.all_to_all_single(other, whole)
        case _:
            return lambda: _round(whole, other, rank, num_ranks)


def _round(mine: torch.Tensor, theirs: torch.Tensor, rank: int, num_ranks: int) -> None:
    """Every rank sends its buffer to the next one."""
    swap = [
        dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
