"""Batches of one process: prefetched by threads, moved to its device, cut into the chunks of its context rank.

With `batch.label_tokens` a step reads global batches until that many labels are counted over all processes. They are
counted before the first forward pass, so that the scale of the loss is known and all processes stop at the same batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.data_position import BatchCounts
from meshwright.engines.native.parallel.context import chunks_of
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.run import TRAINING, VALIDATION, Run, has_removable_reference, with_label_ratio
from meshwright.training import device as devices
from meshwright.training.data import Batch, Batches, Corpus, ReadAhead, Tokenizer, WorkerChoice, joined, open_data
from meshwright.training.data.mixture import SourceProgress
from meshwright.training.data.packing import first_samples
from meshwright.training.data.tokenization import Report

PROMPT_TOKENS = 8
ReferenceOf = Callable[[Sequence[int]], np.ndarray]
"""Log-probabilities [B, 2], fp32, of the answers of pairs by their numbers; see `reference`."""
READS_TO_MEASURE = 16
"""Reads of several steps, after which the time of one is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedBatch:
    """Sequences that a step or an evaluation computes at once."""

    tensors: dict[str, Tensor]  # this process's part, on its device
    counts: BatchCounts
    rewards: Mapping[str, float] = field(default_factory=dict)  # of completions; empty without


class BatchLoader:
    """This process's part of every global batch, by number."""

    def __init__(self, run: Run, *, coordinates: MeshCoordinates, corpus: Corpus) -> None:
        self.coordinates, self.chunks = coordinates, chunks_of(coordinates)
        self.tokenizer: Tokenizer | None = corpus.tokenizer
        self.corpus = corpus
        grpo = run.train.grpo if corpus.tokenizer else None  # random tokens stand for completions
        self.num_completions, self.num_updates = (1, 1) if grpo is None else (grpo.group, grpo.iterations)
        self.batches = Batches(
            samples=corpus.train,
            global_batch=run.global_batch // self.num_completions,
            seed=run.train.seed,
            data_rank=coordinates.data_rank if grpo is None else 0,  # all processes read all prompts
            data_width=coordinates.plan.data if grpo is None else 1,
            vocab=run.model.vocab,
        )
        evaluate = run.train.evaluate
        most = None if evaluate is None else evaluate.num_sequences
        self.validations = {
            name: replace(
                self.batches, samples=first_samples(samples, most), global_batch=run.global_batch,
                is_shuffled=False, is_once=True,
            )
            for name, samples in corpus.validations.items()
        }  # fmt: skip
        self.run = run
        self._training = ReadAhead(self.batches.at, num_workers=run.data.workers)
        if run.label_tokens is not None:  # several are read at once, and then none for as long as a step takes
            self._training.num_steps, self._training.summary = READS_TO_MEASURE, statistics.fmean
        self.needs_reference = run.train.has_reference and not has_removable_reference(run.train, run.lora)
        self.reference: dict[str, ReferenceOf] = {}  # by source of batches, where it is needed
        self.num_validation_batches: dict[str, int] = {}
        self._validation: dict[str, ReadAhead[Batch]] = {}
        for name, batches in self.validations.items():
            assert evaluate is not None
            num_batches = min(evaluate.batches_of(run.global_batch), batches.num_to_the_end)
            self.num_validation_batches[name] = num_batches
            self._validation[name] = ReadAhead(batches.at, num_workers=evaluate.workers, stop=num_batches)

    def begin_at(self, offset: int) -> None:
        """Shift all training batches by `offset` sequences, before the first is read: see `Batches.offset`."""
        self.batches = replace(self.batches, offset=offset // self.num_completions)
        self._training.read = self.batches.at

    def prompts(self, number: int) -> Batch:
        """All prompts of step `number` with their answers, a row each; those of steps behind are prefetched."""
        return self._training.at(number)

    def validation_prompts(self, name: str, index: int) -> Batch:
        """All prompts of batch `index` of a validation source with their answers, and rows of padding."""
        return self._validation[name].at(index)

    def batch(self, first: int) -> LoadedBatch:
        """Sequences of a step that begins with the global batch `first`; batches behind are prefetched. Collective."""
        parts: list[Batch] = []
        num_labels = num_tokens = 0.0
        while not parts or num_labels < (self.run.label_tokens or 0):
            parts.append(self._training.at(first + len(parts)))
            of_labels, of_tokens = self._counts(parts[-1])
            num_labels, num_tokens = num_labels + of_labels, num_tokens + of_tokens
        counts = BatchCounts(first=first, num_batches=len(parts), num_labels=num_labels, num_tokens=num_tokens)
        tensors = self.on_device(joined(parts)) | self._reference(TRAINING, self.batches, first)
        if self.run.train.grpo is not None:
            tensors["advantages_B2"] = _random_advantages(tensors["tokens_BT"])
        return LoadedBatch(tensors=tensors, counts=counts)

    def validation_batch(self, name: str, index: int) -> LoadedBatch:
        """Batch `index` of a validation source: the same samples in every evaluation. Collective."""
        batch = self._validation[name].at(index)
        num_labels, num_tokens = self._counts(batch)
        counts = BatchCounts(first=index, num_batches=1, num_labels=num_labels, num_tokens=num_tokens)
        tensors = self.on_device(batch) | self._reference(f"{VALIDATION} {name}", self.validations[name], index)
        return LoadedBatch(tensors=tensors, counts=counts)

    def progress(self, num_read: int) -> dict[str, SourceProgress]:
        """Samples and epochs of each training source in the first `num_read` global batches of the run."""
        return self.batches.progress(num_read // self.num_updates)

    def planned_epochs(self, *, num_steps: int, next_batch: int) -> tuple[str, ...]:
        """Lines about how often the whole run reads each source of a mixture: `num_steps` steps are to come."""
        steps = with_label_ratio(self.run, self.corpus.label_ratio)
        num_sequences = next_batch * self.run.global_batch + num_steps * steps.global_batch
        num_sequences //= self.num_completions * self.num_updates
        planned = self.corpus.planned_epochs(
            num_steps=self.run.num_steps, num_sequences=self.batches.offset + num_sequences
        )
        return tuple(planned)

    def workers(self) -> dict[str, WorkerChoice | None]:
        """Number of reader threads with its measurement; None where too few batches were read to choose."""
        validation = next(iter(self._validation.values()), None)
        return {"training": self._training.choice, "validation": validation and validation.choice}

    @property
    def validation(self) -> Batches | None:
        """Batches of the first validation source; None: the run has no validation loss."""
        return next(iter(self.validations.values()), None)

    def prompt(self) -> list[int]:
        """The tokens of the validation data before its first answer, or the first ones, for the model to continue."""
        batch = (self.validation or replace(self.batches, offset=0)).at(0)
        before = int((batch.labels_BT[0] != IGNORED_LABEL).int().argmax())  # 1: a document of one token
        return batch.tokens_BT[0, : before + 1 if before > 1 else PROMPT_TOKENS].tolist()

    def _counts(self, batch: Batch) -> list[float]:
        """Labels that the loss counts, or pairs of answers, and tokens without padding, of all data ranks. The host
        waits."""
        has_pairs = self.run.train.preference is not None
        num_labels = (batch.documents_BT > 0).any(1).sum() if has_pairs else batch.num_trained_tokens
        counts = [float(num_labels), float((batch.documents_BT >= 0).sum())]
        if self.coordinates.num_ranks == 1:
            return counts
        sums = torch.tensor(counts, dtype=torch.float64, device=self.coordinates.device)
        dist.all_reduce(sums)
        num_copies = self.coordinates.num_ranks // self.coordinates.plan.data  # of the same sequences
        return (sums / num_copies).tolist()

    def _reference(self, name: str, batches: Batches, index: int) -> dict[str, Tensor]:
        if not self.needs_reference:
            return {}
        log_p_B2 = torch.from_numpy(self.reference[name](batches.sample_numbers(index)))
        return {"reference_BX": log_p_B2.to(self.coordinates.device)}

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of `batch` that this process computes on."""
        documents_BT = batch.documents_BT
        is_one_document = bool((documents_BT == documents_BT[:, :1]).all() and (documents_BT >= 0).all())
        batch = batch.to(self.coordinates.device)
        tensors = {"tokens_BT": batch.tokens_BT, "labels_BT": batch.labels_BT, "positions_BT": batch.positions_BT}
        if self.coordinates.plan.context > 1:
            tensors = {name: self.chunks.of(tensor) for name, tensor in tensors.items()}
        # Without a boundary attention is plainly causal, which has faster kernels than a mask. Documents are not cut
        # into chunks: queries of this rank attend to keys of other ranks.
        return tensors if is_one_document else tensors | {"documents_BT": batch.documents_BT}


def _random_advantages(tokens_BT: Tensor) -> Tensor:
    """Advantages 1 to 7 of rows of random tokens, which stand for completions, and the weight 1 [B, 2]."""
    advantages_B = 1.0 + tokens_BT.sum(1) % 7
    return torch.stack([advantages_B, torch.ones_like(advantages_B)], dim=1)


def open_batch_loader(run: Run, *, coordinates: MeshCoordinates, report: Report | None = None) -> BatchLoader:
    """The data of `run` for this process. The main process tokenises; the others wait and read what it wrote."""
    if coordinates.num_ranks > 1 and not coordinates.is_main:
        dist.barrier()
    corpus = open_data(run, report=report)
    devices.release_memory(coordinates.device)  # tokenising leaves 50 MiB of free heap
    if coordinates.num_ranks > 1 and coordinates.is_main:
        dist.barrier()
    return BatchLoader(run, coordinates=coordinates, corpus=corpus)
