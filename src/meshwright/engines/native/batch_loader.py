"""Batches of one process: prefetched by threads, moved to its device, cut into the chunks of its context rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.parallel.context import chunks_of
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.run import Run
from meshwright.training.data import Batch, Batches, Corpus, ReadAhead, Tokenizer, WorkerChoice, open_data
from meshwright.training.data.mixture import SourceProgress
from meshwright.training.data.packing import first_samples
from meshwright.training.data.tokenization import Report

PROMPT_TOKENS = 8


class BatchLoader:
    """This process's part of every global batch, by number."""

    def __init__(self, run: Run, *, coordinates: MeshCoordinates, corpus: Corpus) -> None:
        self.coordinates, self.chunks = coordinates, chunks_of(coordinates)
        self.tokenizer: Tokenizer | None = corpus.tokenizer
        self.usage, self.notes = corpus.usage, corpus.notes
        self.batches = Batches(
            samples=corpus.train,
            global_batch=run.global_batch,
            seed=run.train.seed,
            data_rank=coordinates.data_rank,
            data_width=coordinates.plan.data,
            vocab=run.model.vocab,
        )
        evaluate = run.train.evaluate
        most = None if evaluate is None else evaluate.num_sequences
        self.validations = {
            name: replace(self.batches, samples=first_samples(samples, most), is_shuffled=False, is_once=True)
            for name, samples in corpus.validations.items()
        }
        self.num_read = 0  # global batches, from the first of the run on
        self._training = ReadAhead(self.batches.at, num_workers=run.data.workers)
        self.num_validation_batches: dict[str, int] = {}
        self._validation: dict[str, ReadAhead[Batch]] = {}
        for name, batches in self.validations.items():
            assert evaluate is not None
            num_batches = min(evaluate.batches_of(run.global_batch), batches.num_to_the_end)
            self.num_validation_batches[name] = num_batches
            self._validation[name] = ReadAhead(batches.at, num_workers=evaluate.workers, stop=num_batches)

    def begin_at(self, offset: int) -> None:
        """Shift all training batches by `offset` sequences, before the first is read: see `Batches.offset`."""
        self.batches = replace(self.batches, offset=offset)
        self._training.read = self.batches.at

    def batch(self, step: int) -> dict[str, Tensor]:
        """This process's part of the batch of `step`; consecutive steps are prefetched."""
        self.num_read = step + 1
        return self._on_device(self._training.at(step))

    def validation_batch(self, name: str, index: int) -> dict[str, Tensor]:
        """This process's part of batch `index` of a validation source: the same samples in every evaluation."""
        return self._on_device(self._validation[name].at(index))

    def progress(self) -> dict[str, SourceProgress]:
        """Samples and epochs of each training source up to the last batch, from the first step of the run on."""
        return self.batches.progress(self.num_read)

    def workers(self) -> dict[str, WorkerChoice | None]:
        """Number of reader threads with its measurement; None where too few batches were read to choose."""
        validation = next(iter(self._validation.values()), None)
        return {"training": self._training.choice, "validation": validation and validation.choice}

    @property
    def validation(self) -> Batches | None:
        """Batches of the first validation source; None: the run has no validation loss."""
        return next(iter(self.validations.values()), None)

    def prompt(self) -> list[int]:
        """The first tokens of the validation data, for the model to continue."""
        return (
            (self.validation or replace(self.batches, offset=0)).at(0).tokens_BT[0, :PROMPT_TOKENS].tolist()
        )

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        documents_BT = batch.documents_BT
        is_one_document = bool((documents_BT == documents_BT[:, :1]).all() and (documents_BT >= 0).all())
        batch = batch.to(self.coordinates.device)
        tensors = {
            "tokens_BT": batch.tokens_BT,
            "labels_BT": batch.labels_BT,
            "positions_BT": batch.positions_BT,
        }
        if self.coordinates.plan.context > 1:
            tensors = {name: self.chunks.of(tensor) for name, tensor in tensors.items()}
        # Without a boundary attention is plainly causal, which has faster kernels than a mask. Documents are not cut
        # into chunks: queries of this rank attend to keys of other ranks.
        return tensors if is_one_document else tensors | {"documents_BT": batch.documents_BT}


def open_batch_loader(run: Run, *, coordinates: MeshCoordinates, report: Report | None = None) -> BatchLoader:
    """The data of `run` for this process. The main process tokenises; the others wait and read what it wrote."""
    if coordinates.num_ranks > 1 and not coordinates.is_main:
        dist.barrier()
    corpus = open_data(run, report=report)
    if coordinates.num_ranks > 1 and coordinates.is_main:
        dist.barrier()
    return BatchLoader(run, coordinates=coordinates, corpus=corpus)


def sum_counts(coordinates: MeshCoordinates, *counts: Tensor) -> list[float]:
    """Sums over all processes, as often as processes see what is counted. Collective; the host waits."""
    sums = torch.stack(counts)
    if coordinates.num_ranks > 1:
        dist.all_reduce(sums)
    return sums.tolist()


def count_tokens(batch: dict[str, Tensor]) -> Tensor:
    """Tokens of this process's part without padding; of the chunks of a sequence, their mean."""
    num = batch["tokens_BT"].numel()
    if "documents_BT" not in batch:
        return torch.tensor(num, dtype=torch.float64, device=batch["tokens_BT"].device)
    is_token_BS = batch["documents_BT"] >= 0
    return is_token_BS.sum().to(torch.float64) * num / is_token_BS.numel()


def count_labels(batch: dict[str, Tensor]) -> Tensor:
    """Labels of this process's part that the loss counts."""
    return (batch["labels_BT"] >= 0).sum().to(torch.float64)
