"""Place of a training in its data: the same on all processes, and part of every checkpoint's manifest.

A step trains on the next global batches that no step has read: one, or with `batch.label_tokens` as many as hold that
many labels. Batches that a fault skips are read and not trained on, and no step reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Counts of what one step reads, over all processes."""

    first: int  # number of the first global batch, from 0
    num_batches: int
    num_labels: float  # that the loss counts
    num_tokens: float  # without padding

    @property
    def last(self) -> int:
        """Number of the last global batch."""
        return self.first + self.num_batches - 1

    @property
    def loss_scale(self) -> float:
        """One over the labels: the scale of a sum of losses that makes it their mean."""
        return 1 / max(1.0, self.num_labels)

    @property
    def router_loss_scale(self) -> float:
        """One over the tokens: the scale of the losses of routers."""
        return 1 / max(1.0, self.num_tokens)


@dataclass(kw_only=True)
class DataPosition:
    """Counts from the first step of a run on, over all its resumptions."""

    next_batch: int = 0  # number of the global batch that the next step reads first
    tokens: int = 0  # positions of the steps taken; skipped batches do not count

    def state(self) -> dict[str, int]:
        """Values for a manifest."""
        return {"next_batch": self.next_batch, "tokens": self.tokens}

    def load(self, manifest: Mapping[str, Any], *, step: int, tokens: int) -> None:
        """Continue after `step` steps from the values of a manifest; an old one may not know its `tokens`."""
        self.next_batch = next_batch_of(manifest, step=step)
        self.tokens = manifest.get("tokens", tokens)


def next_batch_of(manifest: Mapping[str, Any], *, step: int) -> int:
    """The batch after those that a checkpoint has behind it. Old manifests list ranges of skipped ones instead.

    >>> next_batch_of({"guard": {"skipped": [[2, 3], [6, 6]]}}, step=5)
    8
    """
    skipped = (manifest.get("guard") or {}).get("skipped", ())
    return manifest.get("next_batch", step + sum(last - first + 1 for first, last in skipped))
