"""Warm-up steps on random tokens before a training: kernels are compiled and chosen, memory is reserved.

Afterwards weights, optimizer states and random states are what they were, bit for bit: a training continues as if
there had been no warm-up. The copies that are restored are kept in host memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.run import TRAINING, VALIDATION, Run
from meshwright.training.data.corpus import random_corpus
from meshwright.training.masters import local_part


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
    assembly.collect_prediction_losses()  # resets them, as the next line does
    assembly.collect_reward_sums()
    assembly.optimizer.step(learning_rate=learning_rate, accepts=lambda _: True)
    assembly.after_step(load_LE)
    return mean.item()


def warm_up(run: Run, *, assembly: Assembly, coordinates: MeshCoordinates, num_steps: int) -> None:
    """Take `num_steps` steps and an evaluation of one batch on random tokens, and undo them. Collective."""
    if num_steps < 1:
        return
    loader = BatchLoader(run, coordinates=coordinates, corpus=random_corpus(run))
    for name in (TRAINING, f"{VALIDATION} {VALIDATION}"):
        loader.reference[name] = lambda numbers: np.zeros((len(numbers), 2), np.float32)
    with _restored_states(assembly), _restored_random_states(coordinates.device):
        for step in range(num_steps):
            take_bare_step(
                assembly,
                loader.batch(step),
                coordinates=coordinates,
                step=step,
                learning_rate=run.optimizer.learning_rate,
            )
        if run.train.evaluate is not None:
            assembly.eval_mode()
            assembly.stepper.loss(loader.validation_batch(VALIDATION, 0).tensors, scale=1.0)
            assembly.collect_reward_sums()
            assembly.train_mode()


@contextmanager
def _restored_states(assembly: Assembly) -> Iterator[None]:
    """Restore weights, optimizer states and routing biases of this process when the context closes."""
    kept = {name: local_part(tensor).detach().to("cpu", copy=True) for name, tensor in assembly.state().items()}
    yield
    with torch.no_grad():
        state = assembly.state()
        for name, tensor in state.items():
            local_part(tensor).copy_(kept[name])
        assembly.optimizer.restore(state, step=0)


@contextmanager
def _restored_random_states(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy and PyTorch when the context closes."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
