"""Keys and values of earlier tokens, so that a token is computed once.

A layer's cache replaces its core attention, which rotated keys reach: every kind of attention has a core
attention, and masks, windows and scales are the same as in training. Layers with a sliding window keep only
the keys that later tokens can see.

Sequences of different lengths are padded at the left: their last tokens are in the same column. Padding is a document
of its own, which no token attends to.

B sequences, T new tokens, S tokens with the cached ones, G key/value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.specs.model import RopeScaling
from meshwright.training.data.conversations import num_shared
from meshwright.training.models import Block, Transformer
from meshwright.training.models.attention import CoreAttention
from meshwright.training.models.token_layout import LayerLayout, Suffix

LEAST_COLUMNS = 256
PREFILL_TOKENS = 2**13
"""Tokens of all sequences that go through the model at once."""

PADDING, TEXT = -1, 0
"""Documents of the attention mask."""


class CachingAttention(nn.Module):
    """A core attention that keeps the keys and values it was given.

    Columns before `start` are forgotten; columns from `start` to `stop` are in buffers of C columns.
    """

    def __init__(self, core: CoreAttention) -> None:
        super().__init__()
        self.core, self.window = core, core.window  # 0: no window
        self.start = self.stop = 0
        self.k_BCGK: Tensor | None = None
        self.v_BCGV: Tensor | None = None

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, layout: LayerLayout, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Return attention to the new and the cached keys, [B, T, H, V]."""
        before, self.stop = self.stop - self.start, self.stop + k_BTGK.shape[1]
        length = self.stop - self.start
        self.k_BCGK = _with_room(self.k_BCGK, k_BTGK, used=before, needed=length)
        self.v_BCGV = _with_room(self.v_BCGV, v_BTGV, used=before, needed=length)
        self.k_BCGK[:, before:length], self.v_BCGV[:, before:length] = k_BTGK, v_BTGV
        ranges = layout.ranges
        if ranges is not None:
            ranges = ranges.of(slice(None), slice(ranges.num_keys - length, None))
        k_BSGK, v_BSGV = self.k_BCGK[:, :length], self.v_BCGV[:, :length]
        out_BTHV = self.core.attend(q_BTHK, k_BSGK, v_BSGV, ranges=ranges, sinks_H=sinks_H)
        self._forget()
        return out_BTHV

    def rewind(self, stop: int) -> bool:
        """Forget the columns from `stop` on; return False where columns that a window needs are gone already."""
        if self.start > max(0, stop - self.window + 1) if self.window else self.start > 0:
            return False
        self.stop = min(self.stop, stop)
        return True

    def clear(self) -> None:
        """Forget all columns."""
        self.start = self.stop = 0

    def keep(self, rows: Tensor) -> None:
        """Keep these sequences only."""
        assert self.k_BCGK is not None
        assert self.v_BCGV is not None
        self.k_BCGK, self.v_BCGV = self.k_BCGK[rows], self.v_BCGV[rows]

    def _forget(self) -> None:
        """Drop columns that no later query sees, once they outnumber the others: each column is moved once."""
        needed, length = self.window - 1, self.stop - self.start
        if not self.window or length <= 2 * needed:
            return
        assert self.k_BCGK is not None
        assert self.v_BCGV is not None
        last = slice(length - needed, length)
        self.k_BCGK, self.v_BCGV = self.k_BCGK[:, last].clone(), self.v_BCGV[:, last].clone()
        self.start = self.stop - needed


def _with_room(kept_BCGX: Tensor | None, new_BTGX: Tensor, *, used: int, needed: int) -> Tensor:
    """`kept_BCGX` with at least `needed` columns, of which `used` are in use; too few become twice as many."""
    if kept_BCGX is not None and len(kept_BCGX) == len(new_BTGX) and kept_BCGX.shape[1] >= needed:
        return kept_BCGX
    columns = max(LEAST_COLUMNS, 2 * needed if used else needed)
    larger_BCGX = new_BTGX.new_empty(len(new_BTGX), columns, *new_BTGX.shape[2:])
    if used and kept_BCGX is not None:
        larger_BCGX[:, :used] = kept_BCGX[:, :used]
    return larger_BCGX


class CachedModel:
    """A whole model on one device that is fed token by token. A model has one cache at a time: see `close`."""

    def __init__(self, model: Transformer) -> None:
        assert model.embedding is not None, "a pipeline stage generates nothing"
        self.model, self.device = model, model.embedding.weight.device
        self.length = 0  # columns so far, with padding
        self._padding_B: Tensor | None = None  # columns of padding of each sequence; None: there is none
        self._tokens: list[int] | None = None  # of a single sequence
        self._chunks = model.chunks
        self._attentions = [cast(Block, layer).attention for layer in model.layers.values()]
        self._caches: list[CachingAttention] = []
        for attention in self._attentions:
            core = attention.core
            assert isinstance(core, CoreAttention), "the model has another cache"
            self._caches.append(CachingAttention(core))
            attention.set_submodule("core", self._caches[-1])

    def close(self) -> None:
        """Restore the model."""
        self.model.chunks = self._chunks
        for attention, cache in zip(self._attentions, self._caches, strict=True):
            attention.set_submodule("core", cache.core)

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Feed these sequences in place of the sequences before. Returns the logits after each, fp32 [B, V].

        A single sequence keeps the columns that it shares with a single sequence before.
        """
        if len(sequences) == 1 and self._tokens is not None:
            shared = num_shared(self._tokens, sequences[0][:-1])
            if self._is_long(self.length) != self._is_long(len(sequences[0])):
                shared = 0
            shared = self.rewind(shared)
            return self.feed(torch.tensor([sequences[0][shared:]], device=self.device))
        self.clear()
        longest = max(map(len, sequences))
        padding = [longest - len(sequence) for sequence in sequences]
        rows = [[0] * count + list(sequence) for count, sequence in zip(padding, sequences, strict=True)]
        self._padding_B = torch.tensor(padding, device=self.device) if any(padding) else None
        self._tokens = [] if len(sequences) == 1 else None
        return self.feed(torch.tensor(rows, device=self.device))

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to each sequence. Returns the logits after it, fp32 [B, V]."""
        return self.feed(torch.tensor(tokens, device=self.device)[:, None])

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens. Returns the logits after the last of each sequence, fp32 [B, V]."""
        if self._is_long(self.length + tokens_BT.shape[1]) and not self._is_long(self.length):
            assert self._tokens is not None, "sequences of other lengths have other rotations"
            tokens_BT = torch.tensor([self._tokens + tokens_BT[0].tolist()], device=self.device)
            self.clear()
        if self._tokens is not None:
            self._tokens += tokens_BT[0].tolist()
        most = tokens_BT.shape[1] if self.rotates_by_length else max(1, PREFILL_TOKENS // len(tokens_BT))
        hidden_BTD = torch.empty(0)
        try:
            for part_BT in tokens_BT.split(most, dim=1):
                hidden_BTD = self._hidden_states(part_BT)
        except BaseException:  # interrupted: some layers have the new columns and some have not
            self.clear()
            raise
        assert self.model.norm is not None
        assert self.model.head is not None
        return self.model.head(self.model.norm(hidden_BTD[:, -1:]))[:, 0].float()

    def _hidden_states(self, tokens_BT: Tensor) -> Tensor:
        before, self.length = self.length, self.length + tokens_BT.shape[1]
        self.model.chunks = Suffix(before=before)
        if self._padding_B is None:
            return self.model.hidden_states(tokens_BT)
        columns_S = torch.arange(self.length, device=self.device)
        positions_BS = (columns_S - self._padding_B[:, None]).clamp(min=0)
        documents_BS = torch.where(columns_S < self._padding_B[:, None], PADDING, TEXT)
        return self.model.hidden_states(tokens_BT, positions_BS[:, before:], documents_BS)

    @property
    def rotates_by_length(self) -> bool:
        """True if the length of a text changes the rotations of all its tokens; then it is fed in no batch."""
        return self.model.model.rope.scaling is RopeScaling.LONGROPE

    def _is_long(self, length: int) -> bool:
        """True if a text of `length` tokens has the rotations of long texts, which the cached keys must have too."""
        return self.rotates_by_length and length > self.model.model.rope.original_context

    def rewind(self, length: int) -> int:
        """Forget all but the first `length` columns, or all columns if a window has dropped keys that they need.

        Returns the number of columns that are left.
        """
        if not all(cache.rewind(length) for cache in self._caches):
            self.clear()
            return 0
        assert self._tokens is not None, "a batch is not rewound"
        self.length = min(self.length, length)
        del self._tokens[self.length :]
        return self.length

    def clear(self) -> None:
        """Forget all columns."""
        self.length, self._padding_B = 0, None
        self._tokens = None if self._tokens is None else []
        for cache in self._caches:
            cache.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these sequences only, in this order."""
        rows_B = torch.tensor(list(rows), device=self.device)
        for cache in self._caches:
            cache.keep(rows_B)
        if self._padding_B is not None:
            self._padding_B = self._padding_B[rows_B]
