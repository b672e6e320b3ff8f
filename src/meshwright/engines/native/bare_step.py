"""One optimizer step without the faults, checkpoints and logs of a training."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import LoadedBatch
from meshwright.engines.native.parallel.mesh import MeshCoordinates


def take_bare_step(
    assembly: Assembly, batch: LoadedBatch, *, coordinates: MeshCoordinates, step: int, learning_rate: float
) -> float:
    """Update once with `batch`; the mean loss of its labels before it. Collective."""
    assembly.before_step(step)
    assembly.scale_router_losses(batch.counts.router_loss_scale)
    loss = assembly.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
    mean = loss.double() / coordinates.plan.tensor
    if coordinates.num_ranks > 1:
        dist.all_reduce(mean)
    load_LE = assembly.collect_expert_load()
    assembly.collect_prediction_losses()  # resets them
    assembly.optimizer.step(learning_rate=learning_rate, accepts=lambda _: True)
    assembly.after_step(load_LE)
    return mean.item()
