"""Losses of single examples in an evaluation, and of the answers of conversations by turn.

The loss of an example is the mean over its labels, or the loss of a pair of answers. The loss of turn k is the mean
over the labels of all k-th answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.parallel.mesh import MeshCoordinates

NUM_WORST = 5
MOST_TURNS = 16
"""Later answers of a conversation count as the last of these turns."""


@dataclass(kw_only=True)
class ExampleLosses:
    """Sums by source, example and turn."""

    totals: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    labels: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def add(self, source: str, places_2BT: Tensor, losses: Tensor) -> None:
        """Add losses of labels [B, T], or of pairs [B], at these places (`packing.label_places`)."""
        if losses.dim() == 1:  # a pair has no turns
            places_2BT, losses = places_2BT.amax(-1, keepdim=True), losses.unsqueeze(-1)
            places_2BT[1].clamp_(max=0)
        is_label_BT = places_2BT[0] > 0
        places_N2 = places_2BT[:, is_label_BT].T.numpy()
        keys_K2, at_N = np.unique(places_N2, axis=0, return_inverse=True)
        sums_K = np.bincount(at_N, weights=losses[is_label_BT].double().numpy())
        for (number, turn), total, count in zip(keys_K2.tolist(), sums_K, np.bincount(at_N).tolist(), strict=True):
            key = source, number, min(turn, MOST_TURNS)
            self.totals[key] += float(total)
            self.labels[key] += count

    def of_all_processes(self, coordinates: MeshCoordinates) -> ExampleLosses:
        """Return the sums of all processes; empty but in the first one. Collective."""
        if coordinates.num_ranks == 1:
            return self
        # Tensor ranks compute the same losses.
        mine = self if coordinates.tensor_rank == 0 else ExampleLosses()
        parts: list[Any] | None = [None] * coordinates.num_ranks if coordinates.is_main else None
        dist.gather_object(mine, parts)
        whole = ExampleLosses()
        for part in parts or ():
            whole.totals.update(part.totals)
            whole.labels.update(part.labels)
        return whole

    def worst(self) -> list[dict[str, Any]]:
        """The examples with the highest losses."""
        found = [{"source": key[0], "number": key[1]} | row for key, row in self._means(2, first=0)]
        return sorted(found, key=lambda row: -row["loss"])[:NUM_WORST]

    def by_turn(self) -> list[dict[str, Any]]:
        """Losses of the first answers, the second ones and so on; empty where no example has two."""
        found = [{"turn": turn} | row for (turn,), row in self._means(3, first=2)]
        return found if len(found) > 1 else []

    def _means(self, last: int, *, first: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Mean loss and labels by the parts `first` to `last` of the keys, in their order."""
        totals, labels = Counter(), Counter()
        for key, count in self.labels.items():
            totals[key[first:last]] += self.totals[key]
            labels[key[first:last]] += count
        return [(key, {"loss": totals[key] / labels[key], "labels": labels[key]}) for key in sorted(labels)]
