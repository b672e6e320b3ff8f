"""The validation losses of an evaluation, of each source and over the labels of all, and those of a run so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch
from meshwright.specs.run import MEAN, Evaluate

LossOfBatch = Callable[[LoadedBatch], float]
"""Mean loss of a global batch, the same on all processes."""


@dataclass(frozen=True, kw_only=True)
class ValidationLosses:
    """Mean losses per label."""

    by_source: Mapping[str, float]
    mean: float  # of the labels of all sources
    best_by: str  # the source whose loss decides, or MEAN
    rewards: Mapping[str, float] = field(default_factory=dict)  # of pairs of answers, or completions; empty without

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
        r = self.rewards
        rewards = f", margin {r['margin']:.4f}, accuracy {100 * r['accuracy']:.1f} %" if "margin" in r else ""
        rewards += f", reward {r['mean']:.4f}" if "mean" in r else ""
        if not self.named:
            return f"{self.loss:.4f}{rewards}"
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in self.named.items())
        of = "" if self.best_by == MEAN else f" of {self.best_by}"
        return f"{self.loss:.4f}{of} ({each}){rewards}"


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


@dataclass(kw_only=True)
class ValidationHistory:
    """The validation losses of a run so far: the same on all processes, and part of every checkpoint's manifest.

    `best_loss` is the lowest; its checkpoint is kept by `train.checkpoint.keep_best`. Patience has a bar of its own: an
    evaluation improves if its loss is below the bar by more than `min_delta`, and its loss is then the bar. Small steps
    below it that never add up to `min_delta` do not count. A loss that is not a number improves nothing.
    """

    best_loss: float | None = None
    best_step: int | None = None  # steps taken
    bar: float | None = None
    num_worse: int = 0  # evaluations since the last improvement on `bar`

    def note(self, loss: float, *, num_steps: int, min_delta: float) -> bool:
        """Add an evaluation; True if its loss is the lowest so far.

        >>> history = ValidationHistory()
        >>> [history.note(loss, num_steps=i, min_delta=0.1) for i, loss in enumerate([2.0, 1.95, 1.8, 1.9])]
        [True, True, True, False]
        >>> history.best_step, history.num_worse
        (2, 1)
        """
        improves = not math.isnan(loss) and (self.bar is None or loss < self.bar - min_delta)
        self.bar, self.num_worse = (loss, 0) if improves else (self.bar, self.num_worse + 1)
        is_best = not math.isnan(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = loss, num_steps
        return is_best

    def is_exhausted(self, evaluate: Evaluate | None) -> bool:
        """True if as many evaluations as the patience allows did not improve."""
        patience = None if evaluate is None else evaluate.patience
        return patience is not None and self.num_worse >= patience

    def state(self) -> dict[str, Any]:
        """Values for a manifest."""
        return asdict(self)

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the values of a manifest; an old one has none."""
        fresh = ValidationHistory(**(state or {}))
        self.best_loss, self.best_step, self.bar, self.num_worse = (
            fresh.best_loss, fresh.best_step, fresh.bar, fresh.num_worse,
        )  # fmt: skip
