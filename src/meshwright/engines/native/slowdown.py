"""Slowdown of this machine since its calibration: a few steps of the calibration, timed again.

A calibration keeps small steps that were timed with it, by numbers of processes. The processes of a training take
them at the same time, each by itself, as in the calibration. That takes about a second.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist

from meshwright import runfile
from meshwright.calibration.device import Check
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.plan import Plan
from meshwright.training.device import synchronize

BUDGET_S = 0.4
"""For each step."""
FEWEST = 3  # repetitions


def measure_slowdown(checks: tuple[Check, ...], *, num_processes: int, device: torch.device) -> float | None:
    """Ratio of step times now to those of the calibration; None where it has no step of so many processes.

    All processes call it and get the same result, that of the slowest of them.
    """
    logs = [
        math.log(_seconds(check, device) / check.seconds) for check in checks if check.num_processes == num_processes
    ]
    return math.exp(statistics.mean(logs)) if logs else None


def _seconds(check: Check, device: torch.device) -> float:
    run = runfile.loads(check.run)
    assert run.micro_batch is not None
    with torch.random.fork_rng():
        parts = assemble(run, coordinates=MeshCoordinates(plan=Plan(micro_batch=run.micro_batch), device=device))
        tokens_BT = torch.randint(run.model.vocab, (run.global_batch, run.sequence_length), device=device)
    positions_BT = torch.arange(run.sequence_length, device=device).expand(tokens_BT.shape)
    batch = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1), "positions_BT": positions_BT}

    def step_s() -> float:
        synchronize(device)
        start_s = time.perf_counter()
        parts.stepper.forward_backward(batch, scale=1.0 / tokens_BT.numel())
        parts.optimizer.step(learning_rate=0.0)
        synchronize(device)
        return _largest(time.perf_counter() - start_s)

    step_s(), step_s()
    seconds: list[float] = []
    while len(seconds) < FEWEST or sum(seconds) < BUDGET_S:
        seconds.append(step_s())
    return statistics.median(seconds)


def _largest(seconds: float) -> float:
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()
