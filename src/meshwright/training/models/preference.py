"""Losses of pairs of answers to one prompt: a chosen one, c, and a rejected one, r.

    l_y = sum of log p(token) over the tokens of the answer y     n_y = their number     m_y = l_y / n_y
    r_y = beta (l_y - reference l_y)                              reward of DPO; of the others beta l_y, beta m_y below

    dpo     -(1 - e) log σ(r_c - r_r) - e log σ(r_r - r_c)                   e is the label smoothing
    simpo   -(1 - e) log σ(d) - e log σ(-d)    with d = beta (m_c - m_r) - margin
    orpo    -m_c - beta log σ(log odds(m_c) - log odds(m_r))                 log odds(m) = m - log(1 - exp(m))

Sources: Rafailov et al. 2023 (DPO), equation 7; Mitchell 2023 (the label smoothing, "conservative DPO"); Meng et al.
2024 (SimPO), equation 6; Hong et al. 2024 (ORPO), equations 4 to 7. The reference is the model as it was before
training: with adapters the model without them.

A row of a batch holds one pair: document 0 is the chosen answer behind its prompt, document 1 the rejected one.
B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.run import Preference, PreferenceLoss

DEFAULT_MARGIN = 0.5
"""Of SimPO; TRL's."""
NUM_SUMS = 4
"""Rewards of chosen and of rejected answers, pairs whose chosen one has the higher reward, pairs."""


def log_probabilities(losses_BT: Tensor, *, labels_BT: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the log-probabilities of each answer [B, 2], and its tokens [B, 2], from the losses of tokens."""
    of_answer_BT2 = documents_BT.unsqueeze(-1) == torch.arange(2, device=documents_BT.device)
    counted_BT2 = of_answer_BT2 & (labels_BT != IGNORED_LABEL).unsqueeze(-1)
    return -(losses_BT.unsqueeze(-1) * counted_BT2).sum(1), counted_BT2.sum(1)


def pair_losses(
    settings: Preference, log_p_B2: Tensor, lengths_B2: Tensor, reference_B2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Loss of each pair [B], and the rewards of its answers [B, 2]. A row of padding has the loss 0."""
    is_pair_B = (lengths_B2 > 0).all(1)
    mean_B2 = log_p_B2 / lengths_B2.clamp(min=1)
    smoothing = settings.label_smoothing
    if settings.loss is PreferenceLoss.ORPO:
        # A row of padding has the mean 0, whose odds are infinite.
        safe_B2 = mean_B2.where(is_pair_B.unsqueeze(1), -1.0)
        log_odds_B2 = safe_B2 - torch.log1p(-safe_B2.exp())
        losses_B = -mean_B2[:, 0] - settings.beta * logsigmoid(log_odds_B2[:, 0] - log_odds_B2[:, 1])
        return losses_B * is_pair_B, settings.beta * mean_B2.detach()
    margin = 0.0
    if settings.loss is PreferenceLoss.DPO:
        assert reference_B2 is not None
        rewards_B2 = settings.beta * (log_p_B2 - reference_B2)
    else:
        rewards_B2 = settings.beta * mean_B2
        margin = DEFAULT_MARGIN if settings.margin is None else settings.margin
    lead_B = rewards_B2[:, 0] - rewards_B2[:, 1] - margin
    losses_B = -(1 - smoothing) * logsigmoid(lead_B) - smoothing * logsigmoid(-lead_B)
    return losses_B * is_pair_B, rewards_B2.detach()


def sums_of(rewards_B2: Tensor, lengths_B2: Tensor) -> Tensor:
    """The `NUM_SUMS` sums of a batch, fp32."""
    is_pair_B = (lengths_B2 > 0).all(1)
    rewards_B2 = rewards_B2 * is_pair_B.unsqueeze(1)
    is_right_B = (rewards_B2[:, 0] > rewards_B2[:, 1]) & is_pair_B
    return torch.cat([rewards_B2.sum(0), torch.stack([is_right_B.sum(), is_pair_B.sum()])]).float()


def rewards_from(sums: Iterable[float]) -> dict[str, float]:
    """Means of a step or an evaluation, as a record has them.

    >>> rewards_from([1.0, -1.0, 3.0, 4.0])
    {'chosen': 0.25, 'rejected': -0.25, 'margin': 0.5, 'accuracy': 0.75}
    """
    chosen, rejected, num_right, num_pairs = sums
    n = max(1.0, num_pairs)
    means = {"chosen": chosen / n, "rejected": rejected / n, "margin": (chosen - rejected) / n}
    return means | {"accuracy": num_right / n}


def collect_reward_sums(modules: Iterable[nn.Module]) -> list[float]:
    """The `NUM_SUMS` sums since the last call, of the modules of this process; resets them. Empty: no pairs."""
    kept = [sums for module in modules if (sums := getattr(module, "reward_sums", None)) is not None]
    found = [value for sums in kept for value in sums.tolist()]
    for sums in kept:
        sums.zero_()
    return found


@contextmanager
def as_reference(module: nn.Module, *, adapters: Iterable[Any]) -> Iterator[None]:
    """Compute without gradients, without dropout and counts of experts, and without `adapters`."""
    was_training, switched = module.training, list(adapters)
    module.eval()
    for adapter in switched:
        adapter.is_off = True
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
        for adapter in switched:
            adapter.is_off = False
