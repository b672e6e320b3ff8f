"""Positions and visible keys of the tokens in a forward pass, shared by all layers.

B sequences, S tokens of a sequence, T tokens of it on this rank (T = S without context parallelism): queries are T,
keys S. J pairs of rotary dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels.attention.key_ranges import KeyRanges, key_ranges
from meshwright.specs.model import AttentionKind, Model, Rope
from meshwright.training.models.rope import rotation


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """This rank's tokens of every sequence: of 2 `width` equal chunks, number `rank` from each end.

    A late query has many keys and an early query few. The pairing gives every rank the same work. A width of 1 has all.

    >>> [Chunks(rank=r, width=2).order(4).tolist() for r in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    rank: int = 0
    width: int = 1

    def order(self, num_tokens: int, *, device: torch.device | None = None) -> Tensor:
        """Positions of this rank's tokens in their sequence, [T]; `num_tokens` is T."""
        here_T = torch.arange(num_tokens, device=device)
        if self.width == 1:
            return here_T
        length = num_tokens // 2
        late = 2 * self.width - 1 - self.rank
        return here_T + torch.where(here_T < length, self.rank, late - 1) * length

    def length(self, num_tokens: int) -> int:
        """Tokens of a whole sequence of which `num_tokens` are here: S."""
        return num_tokens * self.width

    def of(self, x_BS: Tensor) -> Tensor:
        """This rank's columns of `x_BS`, [B, T]."""
        return x_BS[:, self.order(x_BS.shape[1] // self.width, device=x_BS.device)]


@dataclass(frozen=True, kw_only=True)
class Suffix:
    """The last tokens of every sequence: queries of generation, whose keys of the tokens before them are cached.

    >>> Suffix(before=3).order(2).tolist(), Suffix(before=3).length(2)
    ([3, 4], 5)
    """

    before: int  # cached tokens

    def order(self, num_tokens: int, *, device: torch.device | None = None) -> Tensor:
        """Positions of the last `num_tokens` tokens in their sequence, [T]."""
        return torch.arange(self.before, self.before + num_tokens, device=device)

    def length(self, num_tokens: int) -> int:
        """Tokens of a whole sequence: S."""
        return self.before + num_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerLayout:
    """Rotations of a layer in one forward pass, and the keys that its queries see; None: all before them."""

    cos_BT1J: Tensor
    sin_BT1J: Tensor
    ranges: KeyRanges | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLayout:
    """Rotations and ranges of keys of one forward pass, for layers with full attention and layers with a window."""

    full: LayerLayout
    windowed: LayerLayout
    is_token_BT: Tensor | None  # False at padding; None: there is none


def make_layout(
    positions_BT: Tensor, documents_BS: Tensor | None, *, chunks: Chunks | Suffix, model: Model
) -> TokenLayout:
    """Rotations and ranges of keys.

    `positions_BT` set rotary angles; `documents_BS` are integers, equal within a document, whose tokens are next to
    each other, and negative at padding.
    """
    a = model.attention
    window = a.window if model.num_windowed_layers else 0
    num_tokens, device = positions_BT.shape[1], positions_BT.device
    length = chunks.length(num_tokens)

    def rotations(rope: Rope) -> tuple[Tensor, Tensor]:
        width = a.rope_head_dim if a.kind is AttentionKind.MLA else rope.rotary_width(a.head_dim)
        return rotation(rope, positions_BT, width=width, lengths_BT=lengths_BT)

    order_T = chunks.order(num_tokens, device=device)
    lengths_BT = length if documents_BS is None else document_lengths(documents_BS)[:, order_T]
    is_token_BT = None if documents_BS is None else documents_BS[:, order_T] >= 0
    windowed = ranges = None
    if documents_BS is not None:
        windowed = ranges = key_ranges(documents_BS, order_T=order_T, num_keys=length)
    if 0 < window < length:
        windowed = key_ranges(documents_BS, window=window, order_T=order_T, num_keys=length)
    cos_BT1J, sin_BT1J = rotations(model.rope)
    full = LayerLayout(cos_BT1J=cos_BT1J, sin_BT1J=sin_BT1J, ranges=ranges)
    if model.windowed_rope is not None:
        cos_BT1J, sin_BT1J = rotations(model.windowed_rope)
    in_window = LayerLayout(cos_BT1J=cos_BT1J, sin_BT1J=sin_BT1J, ranges=windowed)
    return TokenLayout(full=full, windowed=in_window, is_token_BT=is_token_BT)


def document_lengths(documents_BS: Tensor) -> Tensor:
    """Tokens of the document of each token, [B, S].

    >>> document_lengths(torch.tensor([[0, 0, 0, 1, -1, -1]])).tolist()
    [[3, 3, 3, 1, 2, 2]]
    """
    changes_BS = functional.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0))
    index_BS = changes_BS.long().cumsum(dim=1)
    counts_BS = torch.zeros_like(index_BS).scatter_add_(1, index_BS, torch.ones_like(index_BS))
    return counts_BS.gather(1, index_BS)
