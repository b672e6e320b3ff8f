"""Text generation for the sample in a record: one token after the other, drawn from the model's distribution.

S tokens of the sequence, T tokens of it on this process, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engines.native.parallel.context import chunks_of
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.generation import Sampling
from meshwright.training.generation import Sampler

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
    """Return `prompt` and `num_tokens` tokens after it. `logits_of` maps the last `context` tokens [1, T] to [1, T, V].

    All processes of a model take part, with the same `prompt`. Keys and values are not cached: a sample is short.
    Every process draws the same tokens.
    """
    chunks = chunks_of(coordinates)
    unit = coordinates.plan.tensor * (2 * coordinates.plan.context if coordinates.plan.context > 1 else 1)
    tokens, sampler = list(prompt), None
    for _ in range(num_tokens):
        seen = tokens[-context:]
        padding = [0] * (-len(seen) % unit)  # to whole chunks; causal attention never reaches it
        tokens_1S = torch.tensor([seen + padding], device=coordinates.device)
        order_T = chunks.order(tokens_1S.shape[1] // chunks.width, device=coordinates.device)
        logits_TV = logits_of(tokens_1S[:, order_T])[0].float()
        logits_V = logits_TV[order_T == len(seen) - 1].sum(dim=0)  # 0 on ranks without the last token
        if coordinates.context_mesh is not None:
            dist.all_reduce(logits_V, group=coordinates.context_mesh.get_group())
        sampler = sampler or Sampler(
            Sampling(temperature=TEMPERATURE, seed=seed), tokens=[prompt], numbers=[0], vocab=len(logits_V)
        )
        tokens += sampler.choose(logits_V.cpu().unsqueeze(0))
    return tokens
