"""Whole training steps of the native engine for `training` points (`records.steps`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.parallel.mesh import mesh_coordinates
from meshwright.records.points import Point
from meshwright.records.steps import plan_of, run_of


def step_of(point: Point, device: torch.device, *, rank: int = 0) -> Callable[[], object]:
    """Return a function that takes one step of the point's model. All of its processes call it together."""
    run, plan = run_of(point), plan_of(point)
    has_own_model = plan.num_devices == 1
    coordinates = mesh_coordinates(
        plan=plan, device=device, rank=0 if has_own_model else rank, num_ranks=plan.num_devices
    )
    with torch.random.fork_rng():
        parts = assemble(run, coordinates=coordinates)
        shape = (run.global_batch // plan.data, run.sequence_length)
        tokens_BT = torch.randint(run.model.vocab, shape, device=device)
    positions_BT = torch.arange(run.sequence_length, device=device).expand(shape)
    batch = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1), "positions_BT": positions_BT}

    def step() -> None:
        loss = parts.stepper.forward_backward(batch, scale=1.0 / tokens_BT.numel()).float()
        if coordinates.num_ranks > 1:
            dist.all_reduce(loss)
        parts.optimizer.step(learning_rate=0.0)

    return step
