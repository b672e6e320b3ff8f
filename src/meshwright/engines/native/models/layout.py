"""What every layer must know about the tokens besides their values: where they stand and what they may see.

B sequences, T tokens of a sequence (queries), S the same tokens as keys, J pairs of rotary dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.engines.native.models.rope import rotation
from meshwright.specs.model import Rope


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Made once per forward pass and shared by all layers.

    A mask is True where a query may see a key; None is plainly causal, which fused kernels know how to skip.
    """

    cos_BT1J: Tensor
    sin_BT1J: Tensor
    mask_B1TS: Tensor | None  # of layers with full attention
    windowed_mask_B1TS: Tensor | None  # of layers with a sliding window


def make_layout(
    positions_BT: Tensor, documents_BT: Tensor | None, *, rope: Rope, rotary_width: int, window: int
) -> Layout:
    """`positions_BT` count tokens in rotary angles; `documents_BT` are any integers, equal within a document.

    `window` is in tokens, 0 where no layer has one.
    """
    cos_BT1J, sin_BT1J = rotation(rope, positions_BT, width=rotary_width)
    length = positions_BT.shape[1]
    device = positions_BT.device
    mask_B1TS = None if documents_BT is None else see(documents_BT, window=0)
    windowed_B1TS = mask_B1TS
    if 0 < window < length:
        one_document = torch.zeros(1, length, dtype=torch.long, device=device)
        windowed_B1TS = see(one_document if documents_BT is None else documents_BT, window=window)
    return Layout(cos_BT1J=cos_BT1J, sin_BT1J=sin_BT1J, mask_B1TS=mask_B1TS, windowed_mask_B1TS=windowed_B1TS)


def see(documents_BT: Tensor, *, window: int) -> Tensor:
    """Which keys each query may see [B, 1, T, S]: earlier ones of its document, the last `window` of them.

    >>> see(torch.tensor([[0, 0, 1, 1]]), window=0)[0, 0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    length = documents_BT.shape[1]
    order_T = torch.arange(length, device=documents_BT.device)
    distance_TS = order_T[:, None] - order_T[None, :]
    allowed_TS = distance_TS >= 0 if window == 0 else (distance_TS >= 0) & (distance_TS < window)
    same_BTS = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same_BTS & allowed_TS).unsqueeze(1)
