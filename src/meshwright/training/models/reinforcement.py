"""Loss of completions that the model itself has written, GRPO.

    A_y = (R_y - mean of the group) / (sd + 1e-4)     R_y is the reward of the completion y; sd of group or batch, or 1
    r_t = exp(l_t - old l_t)                          l_t = log p(token t) at the temperature; old: when y was written
    k_t = exp(reference l_t - l_t) - (reference l_t - l_t) - 1
    L_t = -min(r_t A_y, clip(r_t, 1 - e, 1 + e') A_y) + beta k_t

    grpo     mean over completions of the mean of L_t over their tokens
    dr_grpo  sum of L_t over (completions x `completion_tokens`)
    dapo     mean of L_t over the tokens of a step

Sources: Shao et al. 2024 (GRPO), equations 3 and 4; Liu et al. 2025 (Dr. GRPO), section 3.2; Yu et al. 2025 (DAPO),
equations 8 and 10. Standard deviations divide by one less than the number of rewards, and 1e-4 is added to them, as
TRL 1.16 does. B completions, T tokens, N completions of a step, S completions of a group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.specs.reinforcement import Grpo, GrpoLoss, RewardScale

LEAST_DEVIATION = 1e-4
NUM_SUMS = 4
"""Tokens, tokens whose ratio is clipped, and the sums of k_t and of -l_t."""


def advantages_of(settings: Grpo, rewards_N: Tensor) -> Tensor:
    """A_y [N]; completions of one prompt follow each other.

    >>> settings = Grpo(rewards=(), group=2, scale=RewardScale.NONE)
    >>> advantages_of(settings, torch.tensor([0.0, 1.0, 1.0, 1.0])).tolist()
    [-0.5, 0.5, 0.0, 0.0]
    """
    rewards_XS = rewards_N.view(-1, settings.group)
    advantages_XS = rewards_XS - rewards_XS.mean(1, keepdim=True)
    if settings.scale is not RewardScale.NONE:
        is_of_group = settings.scale is RewardScale.GROUP
        deviation = rewards_XS.std(1, keepdim=True) if is_of_group else rewards_N.std()
        advantages_XS = advantages_XS / (deviation + LEAST_DEVIATION)
    return advantages_XS.flatten()


def token_weights(settings: Grpo, lengths_N: Tensor) -> Tensor:
    """Weight of each token of a completion [N], with which the mean over all tokens of a step is its loss."""
    if settings.loss is GrpoLoss.DAPO:
        return torch.ones_like(lengths_N)
    longest = settings.completion_tokens if settings.loss is GrpoLoss.DR_GRPO else lengths_N
    return lengths_N.sum() / (len(lengths_N) * longest * torch.ones_like(lengths_N))


def completion_losses(
    settings: Grpo,
    log_p_BT: Tensor,
    *,
    labels_BT: Tensor,
    advantages_B2: Tensor,
    old_BT: Tensor | None,
    reference_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of each completion [B], and the `NUM_SUMS` sums, fp32.

    `advantages_B2` has A_y, and the weight of the tokens of y. Without `old_BT`, the old l_t, ratios are 1.
    """
    counted_BT = labels_BT != IGNORED_LABEL
    log_p_BT = log_p_BT * counted_BT
    ratio_BT = (log_p_BT - (log_p_BT.detach() if old_BT is None else old_BT * counted_BT)).exp()
    advantages_B1, weights_B = advantages_B2[:, :1], advantages_B2[:, 1]
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    gain_BT, limit_BT = ratio_BT * advantages_B1, ratio_BT.clamp(1 - settings.epsilon, 1 + high) * advantages_B1
    losses_BT = -torch.minimum(gain_BT, limit_BT)
    drift_BT = torch.zeros_like(log_p_BT)
    if reference_BT is not None:
        rise_BT = reference_BT * counted_BT - log_p_BT
        drift_BT = rise_BT.exp() - rise_BT - 1
        losses_BT = losses_BT + settings.beta * drift_BT
    clipped_BT = (limit_BT < gain_BT) & counted_BT
    sums = torch.stack([counted_BT.sum(), clipped_BT.sum(), drift_BT.sum(), -log_p_BT.sum()])
    return (losses_BT * counted_BT).sum(1) * weights_B, sums.detach().float()


def means_from(sums: Iterable[float], *, has_reference: bool) -> dict[str, float]:
    """Means over the tokens of a step, as a record has them.

    >>> means_from([4.0, 1.0, 0.0, 8.0], has_reference=False)
    {'clipped': 0.25, 'entropy': 2.0}
    """
    num_tokens, clipped, drift, surprise = sums
    means = {"clipped": clipped, "entropy": surprise} | ({"divergence": drift} if has_reference else {})
    return {name: total / max(1.0, num_tokens) for name, total in means.items()}
