"""Rotary position embedding (Su et al. 2021), with the RoPE scaling of Llama 3.1, YaRN, LongRoPE and linear scaling.

    angle(t, i) = t * theta^(-2i/R)          i = 0 .. R/2 - 1

`kernels.rotary` turns pairs of a query or key by these angles.

B sequences, T tokens, K width of a head, R its rotary part, J = R / 2 frequencies; `...` are heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.specs.model import Rope, RopeScaling


def frequencies(rope: Rope, width: int, *, is_long: bool = False, device: torch.device | str | None = None) -> Tensor:
    """Radians per token of each pair, fp32 [J]. `width` is R; `is_long`: the text exceeds the original context.

    Source: transformers, `modeling_rope_utils`.
    """
    pairs_J = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    plain_J = 1.0 / rope.theta ** (pairs_J / width)
    if rope.scaling is RopeScaling.LINEAR:
        return plain_J / rope.factor
    if rope.scaling is RopeScaling.LONGROPE:
        divisors = rope.long_factors if is_long else rope.short_factors
        return plain_J / torch.tensor(divisors, dtype=torch.float32, device=device)
    if rope.scaling is RopeScaling.LLAMA3:
        # Slow pairs are divided by the factor, fast ones stay, with a linear step in turns per context between.
        turns_J = rope.original_context * plain_J / (2 * math.pi)
        keep_J = ((turns_J - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)).clamp(0, 1)
        return (1 - keep_J) * plain_J / rope.factor + keep_J * plain_J
    if rope.scaling is RopeScaling.YARN:
        return _yarn(rope, plain_J)
    return plain_J


def _yarn(rope: Rope, plain_J: Tensor) -> Tensor:
    """Peng et al. 2023, section 3.2: the step is linear in the index of the pair."""
    num_pairs = len(plain_J)
    width = 2 * num_pairs

    def index_with(turns: float) -> float:
        return width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_with(rope.beta_fast), index_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    step = max(high - low, 0.001)  # a step of no width would divide by zero
    index_J = torch.arange(num_pairs, dtype=torch.float32, device=plain_J.device)
    slow_J = ((index_J - low) / step).clamp(0, 1)
    return plain_J / rope.factor * slow_J + plain_J * (1 - slow_J)


def temperature(factor: float, mscale: float) -> float:
    """YaRN's growth of the attention logits with the scaling factor s: 0.1 m ln(s) + 1 (DeepSeek adds the m)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotation_scale(rope: Rope) -> float:
    """The factor of cosine and sine."""
    if rope.scaling not in (RopeScaling.YARN, RopeScaling.LONGROPE):
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.scaling is RopeScaling.LONGROPE:
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_context))
    if rope.mscale and rope.mscale_all_dims:
        return temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dims)
    return temperature(rope.factor, 1.0)


def score_scale(rope: Rope) -> float:
    """The factor of the scores of latent attention, besides 1/sqrt(head width)."""
    if rope.scaling is not RopeScaling.YARN or not rope.mscale_all_dims:
        return 1.0
    return temperature(rope.factor, rope.mscale_all_dims) ** 2


def rotation(rope: Rope, positions_BT: Tensor, *, width: int, lengths_BT: Tensor | int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, fp32 [B, T, 1, J]; the 1 broadcasts over heads. `width` as in `frequencies`.

    `lengths_BT`: number of tokens in the document of each token, or in all documents. LongRoPE chooses its
    divisors by it, so that a document has the same rotations among others as by itself. transformers takes
    the largest position of the batch, which agrees for a batch of one document.

    Computed in every forward: a table in a buffer would have to survive meta devices, casts and sharding, to save a
    few microseconds.
    """
    frequencies_BTJ = frequencies(rope, width, device=positions_BT.device)
    if rope.scaling is RopeScaling.LONGROPE:
        is_long_BT1 = torch.as_tensor(lengths_BT, device=positions_BT.device).unsqueeze(-1) > rope.original_context
        long_J = frequencies(rope, width, is_long=True, device=positions_BT.device)
        frequencies_BTJ = torch.where(is_long_BT1, long_J, frequencies_BTJ)
    angle_BTJ = positions_BT.float().unsqueeze(-1) * frequencies_BTJ
    scale = rotation_scale(rope)
    return (angle_BTJ.cos() * scale).unsqueeze(2), (angle_BTJ.sin() * scale).unsqueeze(2)
