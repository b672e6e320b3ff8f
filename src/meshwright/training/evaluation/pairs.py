"""Pairs of answers to one prompt: how often, and by how much, a model prefers the chosen one.

    reward model    the score at the last token of each answer
    policy          beta (log p - log p of the reference), the reward that DPO trains (Rafailov et al. 2023, section 5)

The loss is that of training (`training.models.preference`). Answers are cut to half of the sequence length, as there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.data.packing import pair_samples
from meshwright.training.evaluation.choices import error_of_mean
from meshwright.training.evaluation.losses import Row, losses_of, scores_of
from meshwright.training.evaluation.text import Text, window_of
from meshwright.training.trained_model import TrainedModel


def evaluate_pairs(
    trained: TrainedModel, text: Text, *, length: int | None, batch: int, reference: TrainedModel | None, beta: float
) -> dict[str, Any]:
    """Loss, accuracy, margin and rewards of pairs, with standard errors. `reference`: None of a reward model."""
    pairs = pair_samples(text.store, text.extents, sequence_length=window_of(trained, length, answers=2))
    if not pairs.num_samples:
        raise InputError("no pair has tokens of both answers in the sequence length", got=text.name)
    rows = [_row(text, *ends) for ends in pairs.ranges_P22.reshape(-1, 2).tolist()]
    rewards_R = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        if reference is None:
            rewards_R += scores_of(trained.module, part)
        else:
            ours, theirs = (losses_of(model.module, part) for model in (trained, reference))
            rewards_R += [beta * float((t - o).double().sum()) for (o, _), (t, _) in zip(ours, theirs, strict=True)]
    rewards_P2 = torch.tensor(rewards_R, dtype=torch.float64).view(-1, 2)
    lead_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    of_pairs = {"loss": -logsigmoid(lead_P), "accuracy": (lead_P > 0).double(), "margin": lead_P}
    of_pairs |= {"chosen": rewards_P2[:, 0], "rejected": rewards_P2[:, 1]}
    found: dict[str, Any] = {"source": text.name, "num_pairs": len(lead_P), "num_cut": pairs.usage.num_cut}
    found["num_skipped"] = pairs.usage.num_samples_without_labels
    for name, values_P in of_pairs.items():
        found |= {name: float(values_P.mean()), f"{name}_standard_error": error_of_mean(values_P.tolist())}
    return found | {"lowest": float(rewards_P2.min()), "highest": float(rewards_P2.max())}


def _row(text: Text, start: int, stop: int) -> Row:
    tokens_N, trained_N = text.store.tokens(start, stop), text.store.trained(start, stop)
    labels_N = np.where(trained_N[1:], tokens_N[1:], IGNORED_LABEL)
    return Row(tokens=tokens_N.tolist(), labels=[*labels_N.tolist(), IGNORED_LABEL])
