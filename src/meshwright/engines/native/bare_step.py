"""One optimizer step without the faults, checkpoints and logs of a training."""

from __future__ import annotations

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import count_labels, count_tokens, sum_counts
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.step import BatchTensors


def take_bare_step(
    assembly: Assembly,
    batch: BatchTensors,
    *,
    coordinates: MeshCoordinates,
    step: int,
    learning_rate: float,
) -> float:
    """Update once with `batch`; the mean loss of the global batch before it. Collective."""
    assembly.before_step(step)
    num_labels, num_tokens = sum_counts(coordinates, count_labels(batch), count_tokens(batch))
    assembly.scale_balance_loss(coordinates.num_copies / max(1.0, num_tokens))
    loss = assembly.stepper.forward_backward(batch, scale=coordinates.num_copies / max(1.0, num_labels))
    (mean,) = sum_counts(coordinates, loss.double() / coordinates.plan.tensor)
    load_LE = assembly.collect_expert_load()
    assembly.optimizer.step(learning_rate=learning_rate, accepts=lambda _: True)
    assembly.after_step(load_LE)
    return mean
