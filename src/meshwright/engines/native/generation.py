"""Text that a model writes: one token after the other, each drawn from the model's distribution.

S tokens of the sequence, T those of them that are on this process, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.parallel.context import chunks_of
from meshwright.engines.native.parallel.mesh import MeshCoordinates

SAMPLE_TOKENS = 64
TEMPERATURE = 0.8


@torch.no_grad()
def generate_sample(
    logits_of: Callable[[Tensor], Tensor],
    *,
    coordinates: MeshCoordinates,
    prompt: Sequence[int],
    num_tokens: int,
    context: int,
    seed: int,
) -> list[int]:
    """`prompt` and `num_tokens` tokens after it; `logits_of` tokens [1, T], the last `context` of them, is [1, T, V].

    All processes of a model take part, those that share its tokens with one `prompt`. Nothing is cached between
    tokens: a sample is short, and every process draws the same one.
    """
    chunks = chunks_of(coordinates)
    generator = torch.Generator().manual_seed(seed)
    unit = coordinates.plan.tensor * (2 * coordinates.plan.context if coordinates.plan.context > 1 else 1)
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen = tokens[-context:]
        padding = [0] * (-len(seen) % unit)  # to whole chunks; it comes after all that is looked at
        tokens_1S = torch.tensor([seen + padding], device=coordinates.device)
        order_T = chunks.order(tokens_1S.shape[1] // chunks.width, device=coordinates.device)
        logits_TV = logits_of(tokens_1S[:, order_T])[0].float()
        logits_V = logits_TV[order_T == len(seen) - 1].sum(dim=0)  # 0 where the last token is not
        if coordinates.context_mesh is not None:
            dist.all_reduce(logits_V, group=coordinates.context_mesh.get_group())
        probabilities_V = (logits_V.cpu() / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    return tokens
