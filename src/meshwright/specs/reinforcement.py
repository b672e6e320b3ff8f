"""Training on a model's own completions, judged by verifiers (GRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from meshwright.specs.limits import Count, Limits, NotNegative, Positive, Share, Spelled


class GrpoLoss(StrEnum):
    """Weights of tokens in the loss (`training.models.reinforcement` has the formulas)."""

    GRPO = "grpo"  # Shao et al. 2024: each completion counts the same
    DR_GRPO = "dr_grpo"  # Liu et al. 2025: each token, over the longest completions that there may be
    DAPO = "dapo"  # Yu et al. 2025: each token of a step counts the same


class RewardScale(StrEnum):
    """Divisor of the advantages of a group."""

    GROUP = "group"  # standard deviation of the group's rewards
    BATCH = "batch"  # of all rewards of a step
    NONE = "none"


class Verifier(StrEnum):
    """Rule that gives a completion a score, 0 or 1; a command's score may be any number."""

    EXACT = "exact"  # the completion is the reference, but for spaces and case
    NUMBER = "number"  # its last number is the reference's last one
    REGEX = "regex"  # `pattern` is found in it; what its first group matches is the reference
    FORMAT = "format"  # the whole completion matches `pattern`
    LENGTH = "length"  # it has at most `most_tokens`
    COMMAND = "command"  # a program reads prompts, completions and references, and writes scores


NEEDS = {
    Verifier.REGEX: "pattern",
    Verifier.FORMAT: "pattern",
    Verifier.LENGTH: "most_tokens",
    Verifier.COMMAND: "command",
}
"""The key that a verifier needs; others have none."""


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression of Python: {error}") from error
    return pattern


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A part of the reward of a completion: the score of a verifier, times its weight."""

    verifier: Verifier
    weight: float = 1.0
    pattern: Annotated[str, _compiled] | None = None
    most_tokens: Count | None = None
    command: Annotated[tuple[str, ...], Limits(min_length=1)] | None = None  # program and arguments
    timeout_s: Positive = 60.0  # of a command


_Reward = Annotated[Reward, Spelled(lambda value: {"verifier": value} if isinstance(value, str) else value)]


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """Training on groups of completions of one prompt, by their rewards relative to the group."""

    rewards: Annotated[tuple[_Reward, ...], Limits(min_length=1)]
    group: Annotated[int, Limits(ge=2, le=10**4)] = 8  # completions of one prompt
    completion_tokens: Count = 256  # at most
    loss: GrpoLoss = GrpoLoss.DAPO
    scale: RewardScale = RewardScale.GROUP
    beta: NotNegative = 0.0  # coefficient of the divergence from the model before training
    epsilon: Share = 0.2  # by which the ratio of new to old probabilities may fall below 1
    epsilon_high: Positive | None = None  # by which it may rise above 1; None: `epsilon`
    iterations: Count = 1  # steps on the same completions
    temperature: Positive = 1.0
    top_k: Count | None = None  # sampled are only the most probable tokens, so many; None: all
    top_p: Share = 1.0  # only those that together reach this probability
