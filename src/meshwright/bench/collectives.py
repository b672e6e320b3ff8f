"""Collectives and training steps of several local processes.

Every process takes part in all points and uses the seconds of the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.bench.harness import measure
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.layer_timing import passes_of, random_batch
from meshwright.engines.native.parallel.mesh import mesh_coordinates
from meshwright.records.device import DeviceRecorder, row_of
from meshwright.records.points import COLLECTIVES_SHARE, Point, PointFamily
from meshwright.records.steps import plan_of, run_of
from meshwright.training.device import disable_malloc_trim, synchronize

# Renamed in PyTorch 2.13.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class PointsTogether:
    """Points that several processes measure together. Can be pickled."""

    collectives: tuple[Point, ...]
    trainings: tuple[Point, ...]
    recorder: DeviceRecorder  # rank 0 writes with it
    device_type: str
    until_s: float  # Unix time at which no further point begins
    point_s: dict[PointFamily, float]  # time for one point


def measure_together(rank: int, num_ranks: int, work: PointsTogether) -> None:
    """Measure collectives, then training steps, until the time is over."""
    device = torch.device(work.device_type, rank) if work.device_type == "cuda" else torch.device("cpu")
    disable_malloc_trim(device)
    left_s = work.until_s - time.time()
    share = COLLECTIVES_SHARE if work.trainings else 1.0
    _measure_all(work.collectives, work, device, rank=rank, until_s=time.time() + share * left_s)
    _measure_all(work.trainings, work, device, rank=rank, until_s=work.until_s)


def _measure_all(
    points: tuple[Point, ...], work: PointsTogether, device: torch.device, *, rank: int, until_s: float
) -> None:
    for point in points:
        if _largest(time.time() - until_s) > 0:
            return
        is_training = point.family is PointFamily.TRAINING
        found = measure(
            step_of(point, device, rank=rank) if is_training else _call(point, device),
            synchronize=lambda: synchronize(device),
            agree=_largest,
            budget_s=work.point_s[point.family],
        )
        if rank == 0:
            work.recorder.append(row_of(point, found))


def _largest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def _call(point: Point, device: torch.device) -> Callable[[], object]:
    """Return a call of the point's collective. `size_bytes` is the whole buffer, of which each rank has a part."""
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
    """Send this rank's buffer to the next rank."""
    swap = [
        dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % num_ranks),
    ]
    for request in dist.batch_isend_irecv(swap):
        request.wait()


def step_of(point: Point, device: torch.device, *, rank: int = 0) -> Callable[[], object]:
    """Return a function that takes one step of the point's model. All of its processes call it together."""
    run, plan = run_of(point), plan_of(point)
    has_own_model = plan.num_devices == 1
    coordinates = mesh_coordinates(
        plan=plan, device=device, rank=0 if has_own_model else rank, num_ranks=plan.num_devices
    )
    with torch.random.fork_rng():
        parts = assemble(run, coordinates=coordinates)
        batch = random_batch(run, micro_batch=run.global_batch // plan.data, device=device)
    passes = passes_of(parts, batch)

    def step() -> None:
        loss = passes().float()
        if coordinates.num_ranks > 1:
            dist.all_reduce(loss)
        parts.optimizer.step(learning_rate=0.0)

    return step
