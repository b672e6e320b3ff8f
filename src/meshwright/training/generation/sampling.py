"""From logits to the next token.

    penalty      l_v <- l_v / r if l_v > 0, else l_v r        of tokens that are there already (Keskar et al. 2019)
    temperature  l <- l / t
    top k        only the k largest l
    top p        only the most probable tokens, until they reach p (Holtzman et al. 2020, nucleus sampling)
    min p        only tokens with at least p max(probability) (Nguyen et al. 2024)

In this order, as transformers applies them. Every sequence draws from a random stream of its own, so its text does not
depend on the other sequences of the batch.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.specs.generation import Sampling
from meshwright.training.models import named_seed


class Sampler:
    """Chooses the tokens of a batch. `numbers` are the prompts' numbers, which set their random streams."""

    def __init__(
        self, sampling: Sampling, *, tokens: Sequence[Sequence[int]], numbers: Sequence[int], vocab: int
    ) -> None:
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(named_seed(sampling.seed, f"prompt {n}")) for n in numbers]
        self._seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen_BV = torch.zeros(len(tokens), vocab, dtype=torch.bool)
            for seen_V, row in zip(self._seen_BV, tokens, strict=True):
                seen_V[list(row)] = True

    def choose(self, logits_BV: Tensor) -> list[int]:
        """The next token of each sequence. `logits_BV` is fp32, and may be changed."""
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV.to(logits_BV.device)
            logits_BV = penalize(logits_BV, self._seen_BV, penalty=self.sampling.repetition_penalty)
        if self.sampling.temperature == 0:
            chosen_B = logits_BV.argmax(dim=-1)
        else:
            chosen_B = self._draw(filtered(logits_BV, self.sampling))
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, chosen_B[:, None], True)
        return chosen_B.tolist()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these sequences only, in this order."""
        self._generators = [self._generators[row] for row in rows]
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[torch.tensor(list(rows), device=self._seen_BV.device)]

    def _draw(self, logits_BV: Tensor) -> Tensor:
        """A token of each row by its probability: one uniform number each, through the cumulative distribution."""
        uniform_B1 = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators])
        cumulative_BV = logits_BV.double().softmax(dim=-1).cumsum(dim=-1)
        target_B1 = uniform_B1.to(logits_BV.device) * cumulative_BV[:, -1:]
        # right: a token of probability 0 has the cumulative probability of the one before, and is passed over
        chosen_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
        return chosen_B.clamp(max=logits_BV.shape[1] - 1)


def penalize(logits_BV: Tensor, seen_BV: Tensor, *, penalty: float) -> Tensor:
    """Make tokens that are there already less probable, or with a penalty below 1 more."""
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def filtered(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits at the temperature; -inf for tokens that top k, top p or min p leave out. One token always stays."""
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[1]), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p is not None:
        ordered_BV, order_BV = logits_BV.sort(dim=-1)
        rest_BV = ordered_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        rest_BV[:, -1] = False
        logits_BV = logits_BV.masked_fill(rest_BV.scatter(1, order_BV, rest_BV), -torch.inf)
    if sampling.min_p is not None:
        probabilities_BV = logits_BV.softmax(dim=-1)
        least_B1 = sampling.min_p * probabilities_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    return logits_BV
