"""Log-probabilities of the answers of pairs under the initial weights, computed once before the first step.

Training of all weights needs them where the loss compares an answer with the model as it was (`train.preference`).
With adapters the reference is the model without them, and each step scores its own pairs. A resumed training
computes them again, from the same weights, before it reads its checkpoint.

S pairs, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.step import Accumulation, Stepper
from meshwright.errors import InputError
from meshwright.specs.run import TRAINING, FaultAction, Run
from meshwright.training.data.batches import NO_SAMPLE, Batches


@dataclass(frozen=True, kw_only=True)
class ReferenceTable:
    """Log-probabilities of the answers of some pairs of a source."""

    numbers_S: np.ndarray  # of pairs, ascending
    log_p_S2: np.ndarray  # fp32

    def of(self, numbers: Sequence[int]) -> np.ndarray:
        """Rows of these pairs [B, 2]; 0 for rows of padding. Raises InputError for a pair that was not computed."""
        wanted_B = np.asarray(numbers)
        places_B = np.searchsorted(self.numbers_S, wanted_B).clip(max=len(self.numbers_S) - 1)
        is_known_B = self.numbers_S[places_B] == wanted_B
        if not (is_known_B | (wanted_B == NO_SAMPLE)).all():
            raise InputError(
                "the reference of a pair of answers is unknown: the run reads other pairs than it would from its start",
                hint="resume with batch.global_sequences and train.steps as the run began",
            )
        return np.where(is_known_B[:, None], self.log_p_S2[places_B], np.float32(0))


def score_references(loader: BatchLoader, stepper: Stepper, *, num_steps: int) -> None:
    """Give `loader` the log-probabilities of all answers that a run reads, of the weights as they are. Collective."""
    if not loader.needs_reference:
        return
    assert isinstance(stepper, Accumulation)  # pairs under a pipeline are refused
    num_batches = num_steps + most_skipped(loader.run)
    every = Batches(samples=loader.batches.samples, global_batch=loader.batches.global_batch, seed=loader.batches.seed)
    read = {number for step in range(num_batches) for number in every.sample_numbers(step)}
    tables = {TRAINING: _table(read, loader, stepper, batches=loader.batches)}
    for name, batches in loader.validations.items():
        num = min(batches.samples.num_samples, loader.num_validation_batches[name] * batches.global_batch)
        tables[f"validation {name}"] = _table(range(num), loader, stepper, batches=batches)
    loader.reference = {name: table.of for name, table in tables.items()}


def most_skipped(run: Run) -> int:
    """Most global batches that faults can make a run pass over."""
    faults, saves = run.train.faults, run.train.checkpoint
    actions = {faults.not_finite, faults.spike}
    if FaultAction.ROLL_BACK in actions and saves is not None:
        return faults.max_events * (saves.every_steps + 1)
    return faults.max_events if FaultAction.SKIP in actions else 0


def _table(numbers: Collection[int], loader: BatchLoader, stepper: Accumulation, *, batches: Batches) -> ReferenceTable:
    """Score these pairs, as many at a time as a step's micro-batch on each data rank."""
    where = loader.coordinates
    width, rows = where.plan.data, where.plan.micro_batch
    numbers_S = np.array(sorted(numbers), dtype=np.int64)
    padding = -len(numbers_S) % (width * rows)
    parts = np.concatenate([numbers_S, np.full(padding, NO_SAMPLE)]).reshape(-1, width, rows)
    log_p = torch.zeros(*parts.shape, 2, device=where.device)
    for index, of_ranks in enumerate(parts):
        batch = batches.of(of_ranks[where.data_rank].tolist())
        log_p[index, where.data_rank] = stepper.scores(loader.on_device(batch))
    if where.num_ranks > 1:
        dist.all_reduce(log_p, op=dist.ReduceOp.MIN)  # other ranks have 0, and no logarithm of a probability is above
    return ReferenceTable(numbers_S=numbers_S, log_p_S2=log_p.view(-1, 2)[: len(numbers_S)].cpu().numpy())
