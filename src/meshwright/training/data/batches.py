"""Global batches as a pure function of (seed, step, data rank, data width).

Step i trains on samples i*G to i*G + G - 1 of an endless order: epoch after epoch, each shuffled anew. Data rank r of
w takes the r-th of w equal parts of every batch, so the batches of all ranks laid end to end are the same on any number
of processes, and the step number is all the state there is: resuming means asking for the next step.

    B sequences of this rank   T positions of a sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.run import TRAINING
from meshwright.training.data.mixture import Mixture, SourceProgress
from meshwright.training.data.packing import Sample, Samples, padding_sample
from meshwright.training.data.shuffle import Permutation
from meshwright.training.data.workers import prefetch

NO_SAMPLE = -1
"""Number of a row of padding."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64: the next token; IGNORED_LABEL (-100) where the loss does not count it
    positions_BT: torch.Tensor  # int64: from the start of the document
    documents_BT: torch.Tensor  # int64: 0, 1, ... within a row; -1 is padding

    @property
    def num_trained_tokens(self) -> int:
        """Labels that the loss counts."""
        return int((self.labels_BT != IGNORED_LABEL).sum())

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device | str) -> Batch:
        """A copy on `device`, from pinned memory without waiting where that is a GPU."""
        is_gpu = torch.device(device).type == "cuda"
        tensors = {name: tensor.pin_memory() if is_gpu else tensor for name, tensor in self._tensors().items()}
        return Batch(**{name: tensor.to(device, non_blocking=is_gpu) for name, tensor in tensors.items()})

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Consecutive rows, `size` at a time; the last part is smaller where it does not divide."""
        for start in range(0, len(self.tokens_BT), size):
            yield Batch(**{name: tensor[start : start + size] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all `batches`, in order."""
    if len(batches) == 1:
        return batches[0]
    return Batch(**{f.name: torch.cat([getattr(batch, f.name) for batch in batches]) for f in fields(Batch)})


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of one data rank. Ranks with the same data (tensor, pipeline, context) have the same `data_rank`."""

    samples: Samples
    global_batch: int  # sequences of all data ranks together
    seed: int = 0
    data_rank: int = 0
    data_width: int = 1
    vocab: int | None = None  # of the model; a token beyond it is refused
    offset: int = 0  # sequences: batch i begins at sequence i x global_batch + offset, after another batch size
    is_shuffled: bool = True  # False: corpus order, for validation
    is_once: bool = False  # rows after the last sample are padding: an evaluation counts every sample once

    def __post_init__(self) -> None:
        if self.data_width < 1 or self.global_batch < 1 or self.global_batch % self.data_width:
            raise InputError(
                "a global batch is split evenly over the data ranks",
                got=f"{self.global_batch} sequences for {self.data_width} ranks",
            )
        if not 0 <= self.data_rank < self.data_width:
            raise InputError("data rank", got=self.data_rank, allowed=f"0 to {self.data_width - 1}")
        if self.samples.num_samples < 1:
            raise InputError("the data has not one whole sample", hint="use more text or a shorter sequence")

    @property
    def num_to_the_end(self) -> int:
        """Global batches of one epoch, the last one with padding where it is not whole."""
        return -(-self.samples.num_samples // self.global_batch)

    def progress(self, step: int) -> dict[str, SourceProgress]:
        """Samples and epochs of each source before `step`."""
        place = self.offset + step * self.global_batch
        if isinstance(self.samples, Mixture):
            return self.samples.progress(place)
        epochs = place / self.samples.num_samples
        return {TRAINING: SourceProgress(share=1.0, num_samples=place, num_epochs=epochs)}

    def sample_numbers(self, step: int) -> list[int]:
        """Numbers of this rank's samples in `step`; `NO_SAMPLE` is a row of padding."""
        num_rows = self.global_batch // self.data_width
        first = self.offset + step * self.global_batch + self.data_rank * num_rows
        if isinstance(self.samples, Mixture):
            return self.samples.numbers(range(first, first + num_rows), seed=self.seed)
        epochs, places = np.divmod(np.arange(first, first + num_rows, dtype=np.int64), self.samples.num_samples)
        if self.is_once:
            places[epochs > 0] = NO_SAMPLE
        if not self.is_shuffled:
            return places.tolist()
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            order = Permutation(length=self.samples.num_samples, seed=self.seed, epoch=int(epoch))
            numbers[of_epoch] = order.at(places[of_epoch])
        return numbers.tolist()

    def at(self, step: int) -> Batch:
        """This rank's part of global batch `step`, counted from 0."""
        return self.of(self.sample_numbers(step))

    def of(self, numbers: Sequence[int]) -> Batch:
        """The samples of these numbers, a row each."""
        samples = [self._sample(number) for number in numbers]
        self._refuse_unknown_tokens(samples)
        return batch_of(samples)

    def iterate(self, *, start: int = 0, stop: int | None = None, num_workers: int = 1) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ... up to `stop` (exclusive; None: endless), read ahead by threads."""
        return prefetch(self.at, start=start, stop=stop, num_workers=num_workers)

    def _sample(self, number: int) -> Sample:
        if number == NO_SAMPLE:
            return padding_sample(self.samples.sequence_length)
        return self.samples.sample(number)

    def _refuse_unknown_tokens(self, samples: list[Sample]) -> None:
        smallest = min(int(s.tokens_T.min()) for s in samples)
        largest = max(int(s.tokens_T.max()) for s in samples)
        if self.vocab is not None and (smallest < 0 or largest >= self.vocab):
            raise InputError(
                "a token of the data is not in the model's vocabulary", got=smallest if smallest < 0 else largest,
                allowed=f"0 to {self.vocab - 1}",
                hint="the tokenizer (or the one that made the token files) does not belong to this model",
            )  # fmt: skip


def batch_of(samples: Sequence[Sample]) -> Batch:
    """A batch of these samples, a row each."""

    def rows(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(s, f"{name}_T") for s in samples]).astype(np.int64, copy=False))

    return Batch(
        tokens_BT=rows("tokens"), labels_BT=rows("labels"), positions_BT=rows("positions"),
        documents_BT=rows("documents"),
    )  # fmt: skip
