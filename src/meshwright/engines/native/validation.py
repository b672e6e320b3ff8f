"""The validation losses of an evaluation: of each source, and over the labels of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch
from meshwright.specs.run import MEAN

LossOfBatch = Callable[[LoadedBatch], float]
"""Mean loss of a global batch, the same on all processes."""


@dataclass(frozen=True, kw_only=True)
class ValidationLosses:
    """Mean losses per label."""

    by_source: Mapping[str, float]
    mean: float  # of the labels of all sources
    best_by: str  # the source whose loss decides, or MEAN

    @property
    def loss(self) -> float:
        """The validation loss of the run: what is compared with a target, and with earlier evaluations."""
        return self.mean if self.best_by == MEAN else self.by_source[self.best_by]

    @property
    def named(self) -> dict[str, float]:
        """The loss of each source and their mean; empty for one source."""
        return {} if len(self.by_source) < 2 else {**self.by_source, MEAN: self.mean}

    def describe(self) -> str:
        """The loss, and those of several sources.

        >>> losses = ValidationLosses(by_source={"web": 2.0, "code": 1.0}, mean=1.5, best_by="code")
        >>> losses.describe()
        '1.0000 of code (web 2.0000, code 1.0000, mean 1.5000)'
        """
        if not self.named:
            return f"{self.loss:.4f}"
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in self.named.items())
        of = "" if self.best_by == MEAN else f" of {self.best_by}"
        return f"{self.loss:.4f}{of} ({each})"


def validation_losses(
    loader: BatchLoader, loss_of: LossOfBatch, *, best_by: str, before_batch: Callable[[], None]
) -> ValidationLosses:
    """Evaluate all sources; every label counts the same, however the batches are filled. Collective."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for name, num_batches in loader.num_validation_batches.items():
        sums[name] = counts[name] = 0.0
        for index in range(num_batches):
            before_batch()
            batch = loader.validation_batch(name, index)
            sums[name] += loss_of(batch) * batch.counts.num_labels
            counts[name] += batch.counts.num_labels
    return ValidationLosses(
        by_source={name: sums[name] / max(1.0, counts[name]) for name in sums},
        mean=sum(sums.values()) / max(1.0, sum(counts.values())),
        best_by=best_by,
    )
