"""Losses of single tokens, and the standard error of their mean.

B sequences, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.model import RopeScaling
from meshwright.training.models import Transformer

CHUNK_LOGITS = 2**24
"""Logits in memory at once, as numbers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence, and the label of each of its tokens: the next one, or `IGNORED_LABEL`."""

    tokens: Sequence[int]
    labels: Sequence[int]


class RowLosses(NamedTuple):
    """Losses of a row's tokens on the host."""

    losses_T: Tensor  # nats, fp32; 0 where there is no label
    is_first_T: Tensor  # the label is the most probable token, or there is none


MAX_TURN = 8
"""Answers of a document that have a loss of their own; later ones count as this one."""


def turns_of(trained_N: np.ndarray) -> np.ndarray:
    """The answer of a document that each of its tokens is in or behind, from 1 to `MAX_TURN`; 0 before the first one.

    >>> turns_of(np.array([False, True, True, False, True])).tolist()
    [0, 1, 1, 1, 2]
    """
    begins_N = np.diff(trained_N.astype(np.int8), prepend=0) > 0
    return np.minimum(np.cumsum(begins_N), MAX_TURN)


@torch.inference_mode()
def losses_of(module: Transformer, rows: Sequence[Row]) -> list[RowLosses]:
    """Losses of the tokens of each row.

    Shorter rows are padded at the right, where causal attention never looks.
    """
    return [part for batch in _like_lengths(module, rows) for part in _of_batch(module, batch)]


def _like_lengths(module: Transformer, rows: Sequence[Row]) -> list[Sequence[Row]]:
    """The rows as one batch; one by one where the length of a batch changes the rotations."""
    is_by_length = module.model.rope.scaling is RopeScaling.LONGROPE
    return [[row] for row in rows] if is_by_length else [rows]


@torch.inference_mode()
def scores_of(module: Transformer, rows: Sequence[Row]) -> list[float]:
    """Scores of a reward model at the last token of each row."""
    assert module.head is not None
    found: list[float] = []
    for batch in _like_lengths(module, rows):
        ends_B = [len(row.tokens) - 1 for row in batch]
        found += module.head(_hidden_states(module, batch)[range(len(batch)), ends_B]).float().flatten().tolist()
    return found


def _hidden_states(module: Transformer, rows: Sequence[Row]) -> Tensor:
    """Behind the norm, [B, T, D]."""
    assert module.norm is not None
    longest, device = max(len(row.tokens) for row in rows), next(module.parameters()).device
    tokens_BT = torch.tensor([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in rows], device=device)
    return module.norm(module.hidden_states(tokens_BT))


def _of_batch(module: Transformer, rows: Sequence[Row]) -> list[RowLosses]:
    assert module.head is not None
    hidden_BTD = _hidden_states(module, rows)
    longest, hidden_ND = hidden_BTD.shape[1], hidden_BTD.flatten(0, 1)
    labels_BT = torch.tensor(
        [[*row.labels, *[IGNORED_LABEL] * (longest - len(row.labels))] for row in rows], device=hidden_ND.device
    )
    chunk = max(1, CHUNK_LOGITS // module.model.vocab)
    losses, firsts = [], []
    for hidden_CD, labels_C in zip(hidden_ND.split(chunk), labels_BT.flatten().split(chunk), strict=True):
        logits_CV = module.head(hidden_CD).float()
        losses.append(functional.cross_entropy(logits_CV, labels_C, ignore_index=IGNORED_LABEL, reduction="none"))
        firsts.append((logits_CV.argmax(dim=-1) == labels_C) | (labels_C == IGNORED_LABEL))
    losses_BT, firsts_BT = (torch.cat(parts).view_as(labels_BT).cpu() for parts in (losses, firsts))
    lengths = [len(row.tokens) for row in rows]
    return [RowLosses(losses_BT[i, :n], firsts_BT[i, :n]) for i, n in enumerate(lengths)]


@dataclass(kw_only=True)
class MeanLoss:
    """The mean over tokens, and its standard error over rows: tokens of one row depend on each other.

    mean = Σ L_r / Σ n_r        error² = R / (R - 1) Σ (L_r - mean n_r)² / (Σ n_r)²        of R rows
    (the ratio estimator: Cochran 1977, Sampling Techniques, section 2.11)
    """

    total: float = 0.0
    num_tokens: int = 0
    num_rows: int = 0
    _squares: float = 0.0  # Σ L²
    _products: float = 0.0  # Σ L n
    _counts: float = 0.0  # Σ n²

    def add(self, total: float, num_tokens: int) -> None:
        """Count a row with this sum of losses."""
        if not num_tokens:
            return
        self.total += total
        self.num_tokens += num_tokens
        self.num_rows += 1
        self._squares += total * total
        self._products += total * num_tokens
        self._counts += num_tokens * num_tokens

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.num_tokens

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for a single row."""
        if self.num_rows < 2:
            return None
        squares = self._squares - 2 * self.mean * self._products + self.mean**2 * self._counts
        return math.sqrt(max(0.0, squares) * self.num_rows / (self.num_rows - 1)) / self.num_tokens
