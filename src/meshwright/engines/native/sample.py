"""Text that a model writes: one token after the other, each drawn from the model's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SAMPLE_TOKENS = 64
TEMPERATURE = 0.8


@torch.no_grad()
def write_sample(
    logits_of: Callable[[Tensor], Tensor],
    *,
    prompt: Sequence[int],
    num_tokens: int,
    context: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """`prompt` and `num_tokens` tokens after it; `logits_of` tokens [1, T], the last `context` of them, is [1, T, V].

    Nothing is cached between tokens: a sample is short, and every process of a sharded model draws the same one.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen_1T = torch.tensor([tokens[-context:]], device=device)
        logits_V = logits_of(seen_1T)[0, -1].float().cpu()
        probabilities_V = (logits_V / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    return tokens
