"""Losses of pairs of answers to one prompt, a chosen one, c, and a rejected one, r; and of single answers.

    l_y = sum of log p(token) over the tokens of the answer y     n_y = their number     m_y = l_y / n_y
    r_y = beta (l_y - reference l_y)                              reward of DPO; of the others beta l_y, beta m_y below

    dpo     -(1 - e) log σ(r_c - r_r) - e log σ(r_r - r_c)                   e is the label smoothing
    simpo   -(1 - e) log σ(d) - e log σ(-d)    with d = beta (m_c - m_r) - margin
    kto     w (1 - σ(s (r_y - z)))             s = 1 for a desirable answer, -1 for another; w is the weight of its kind
            z = beta max(0, mean of l_u - reference l_u), without gradient; u: the answers of other records
    orpo    -m_c - beta log σ(log odds(m_c) - log odds(m_r))                 log odds(m) = m - log(1 - exp(m))
    reward  -log σ(s_c - s_r) + c (s_c + s_r)²           s_y = w h, of the hidden states h of the last token of y

Sources: Rafailov et al. 2023 (DPO), equation 7; Mitchell 2023 (the label smoothing, "conservative DPO"); Meng et al.
2024 (SimPO), equation 6; Ouyang et al. 2022 (reward models), equation 1; Eisenstein et al. 2023, section 2 (their
center); Hong et al. 2024 (ORPO), equations 4 to 7; Ethayarajh et al. 2024 (KTO), equation 8. The
reference is the model as it was before training: with adapters the model without them.

A row of a batch holds one pair: document 0 is the chosen answer behind its prompt, document 1 the rejected one. Of KTO
it holds an answer behind its prompt, document 0 if it is desirable and 1 if not, and then, as the other one, the answer
of another record behind the same prompt. The mean of z is over the answers in memory: a micro-batch of all data ranks.
B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import logsigmoid

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.run import Preference, PreferenceLoss

DEFAULT_MARGIN = 0.5
"""Of SimPO; TRL's."""
NUM_SUMS = 5
"""Rewards of chosen and of rejected answers, answers on the right side of the other or of z, and both their numbers."""


def log_probabilities(losses_BT: Tensor, *, labels_BT: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the log-probabilities of each answer [B, 2], and its tokens [B, 2], from the losses of tokens."""
    of_answer_BT2 = documents_BT.unsqueeze(-1) == torch.arange(2, device=documents_BT.device)
    counted_BT2 = of_answer_BT2 & (labels_BT != IGNORED_LABEL).unsqueeze(-1)
    return -(losses_BT.unsqueeze(-1) * counted_BT2).sum(1), counted_BT2.sum(1)


def pair_losses(
    settings: Preference,
    log_p_B2: Tensor,
    lengths_B2: Tensor,
    reference_B2: Tensor | None,
    *,
    is_chosen_first_B: Tensor,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each row [B], and the `NUM_SUMS` sums of rewards, fp32. A row of padding has the loss 0.

    `is_chosen_first_B`: the first document of the row is number 0. `group`: processes with other rows.
    """
    is_pair_B = (lengths_B2 > 0).all(1)
    if settings.loss is PreferenceLoss.KTO:
        assert reference_B2 is not None
        return _judged_losses(settings, log_p_B2 - reference_B2, is_pair_B, is_chosen_first_B, group)
    mean_B2 = log_p_B2 / lengths_B2.clamp(min=1)
    smoothing = settings.label_smoothing
    if settings.loss is PreferenceLoss.ORPO:
        # A row of padding has the mean 0, whose odds are infinite.
        safe_B2 = mean_B2.where(is_pair_B.unsqueeze(1), -1.0)
        log_odds_B2 = safe_B2 - torch.log1p(-safe_B2.exp())
        losses_B = -mean_B2[:, 0] - settings.beta * logsigmoid(log_odds_B2[:, 0] - log_odds_B2[:, 1])
        return losses_B * is_pair_B, _sums(settings.beta * mean_B2, is_pair_B)
    margin = 0.0
    if settings.loss is PreferenceLoss.DPO:
        assert reference_B2 is not None
        rewards_B2 = settings.beta * (log_p_B2 - reference_B2)
    else:
        rewards_B2 = settings.beta * mean_B2
        margin = DEFAULT_MARGIN if settings.margin is None else settings.margin
    lead_B = rewards_B2[:, 0] - rewards_B2[:, 1] - margin
    losses_B = -(1 - smoothing) * logsigmoid(lead_B) - smoothing * logsigmoid(-lead_B)
    return losses_B * is_pair_B, _sums(rewards_B2, is_pair_B)


def scores_at_ends(scores_BT1: Tensor, *, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Score at the last token of each of two answers [B, 2], fp32, and whether it is there [B, 2]."""
    of_answer_BT2 = documents_BT.unsqueeze(-1) == torch.arange(2, device=documents_BT.device)
    places_T1 = torch.arange(documents_BT.shape[1], device=documents_BT.device).unsqueeze(-1)
    last_B2 = (of_answer_BT2 * places_T1).amax(1)
    return scores_BT1.squeeze(-1).float().gather(1, last_B2), of_answer_BT2.any(1)


def reward_losses(settings: Preference, rewards_B2: Tensor, is_pair_B: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row of a reward model [B], and the `NUM_SUMS` sums of its scores. A row of padding has the loss 0.

    >>> losses, sums = reward_losses(Preference(loss=PreferenceLoss.REWARD), torch.zeros(1, 2), torch.tensor([True]))
    >>> round(losses.item(), 4)
    0.6931
    """
    losses_B = -logsigmoid(rewards_B2[:, 0] - rewards_B2[:, 1]) + settings.center_coefficient * rewards_B2.sum(1) ** 2
    return losses_B * is_pair_B, _sums(rewards_B2, is_pair_B)


def _sums(rewards_B2: Tensor, is_pair_B: Tensor) -> Tensor:
    rewards_B2 = rewards_B2.detach() * is_pair_B.unsqueeze(1)
    num_right, num = 2 * ((rewards_B2[:, 0] > rewards_B2[:, 1]) & is_pair_B).sum(), is_pair_B.sum()
    return torch.stack([*rewards_B2.sum(0), num_right, num, num]).float()


def _judged_losses(
    settings: Preference, ratio_B2: Tensor, is_pair_B: Tensor, is_desirable_B: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """KTO: `ratio_B2` are the log-ratios to the reference, of the own answer in column 0 where it is desirable."""
    own_B, other_B = torch.where(is_desirable_B, ratio_B2.T, ratio_B2.flip(1).T)
    drift = torch.stack([(other_B.detach() * is_pair_B).sum(), is_pair_B.sum().float()])
    if group is not None:
        dist.all_reduce(drift, group=group)
    baseline = settings.beta * (drift[0] / drift[1].clamp(min=1)).clamp(min=0)
    rewards_B = settings.beta * own_B
    lead_B = torch.where(is_desirable_B, rewards_B - baseline, baseline - rewards_B)
    weight_B = torch.where(is_desirable_B, settings.desirable_weight, settings.undesirable_weight)
    kinds_2B = torch.stack([is_desirable_B, ~is_desirable_B]) & is_pair_B
    num_right = ((lead_B > 0) & is_pair_B).sum()
    sums = [*(rewards_B.detach() * kinds_2B).sum(1), num_right, *kinds_2B.sum(1)]
    return weight_B * (1 - lead_B.sigmoid()) * is_pair_B, torch.stack(sums).float()


def rewards_from(sums: Iterable[float]) -> dict[str, float]:
    """Means of a step or an evaluation, as a record has them.

    >>> rewards_from([1.0, -1.0, 6.0, 4.0, 4.0])
    {'chosen': 0.25, 'rejected': -0.25, 'margin': 0.5, 'accuracy': 0.75}
    """
    chosen, rejected, num_right, num_chosen, num_rejected = sums
    means = {"chosen": chosen / max(1.0, num_chosen), "rejected": rejected / max(1.0, num_rejected)}
    accuracy = num_right / max(1.0, num_chosen + num_rejected)
    return means | {"margin": means["chosen"] - means["rejected"], "accuracy": accuracy}


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
