"""Warm-up steps on random tokens before a training: kernels are compiled and chosen, memory is reserved.

Afterwards weights, optimizer states and random states are what they were, bit for bit: a training continues as if
there had been no warm-up. The copies that are restored are kept in host memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.run import VALIDATION, Run
from meshwright.training.data import Corpus
from meshwright.training.data.packing import SyntheticSamples
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
    assembly.collect_prediction_losses()  # resets them
    assembly.optimizer.step(learning_rate=learning_rate, accepts=lambda _: True)
    assembly.after_step(load_LE)
    return mean.item()


def warm_up(run: Run, *, assembly: Assembly, coordinates: MeshCoordinates, num_steps: int) -> None:
    """Take `num_steps` steps and an evaluation of one batch on random tokens, and undo them. Collective."""
    if num_steps < 1:
        return
    loader = BatchLoader(run, coordinates=coordinates, corpus=_random_corpus(run))
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
            assembly.train_mode()


def _random_corpus(run: Run) -> Corpus:
    length, vocab = run.sequence_length, run.model.vocab
    train = SyntheticSamples(vocab=vocab, sequence_length=length, seed=run.train.seed)
    held = {} if run.train.evaluate is None else {VALIDATION: replace(train, seed=~run.train.seed)}
    return Corpus(train=train, validations=held, tokenizer=None, num_tokens=None)


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
