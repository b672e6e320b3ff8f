"""The keys that each query sees, as a range: first and last key of every query, instead of a mask of T x S.

Causal attention, packed documents, sliding windows, the suffixes of generation and the chunks of context parallelism
are all of this kind, for the tokens of a document are next to each other:

    first = max(start of the query's document, query - window + 1)        last = query

A query whose range is empty sees nothing; its output is 0.

B sequences (or 1, where all are alike), T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyRanges:
    """First and last key of every query, int32 [B, T]; the keys are numbered 0 to `num_keys` - 1."""

    first_BT: Tensor
    last_BT: Tensor
    num_keys: int

    @property
    def mask_B1TS(self) -> Tensor:  # noqa: N802 (a tensor, named with its shape)
        """The ranges as a mask, True where a query sees a key, for kernels that take only masks."""
        # A graph makes its own: the compiler cannot enter the lock of `cached_property` in Python 3.11.
        return self._mask() if torch.compiler.is_compiling() else self._kept_mask

    @cached_property
    def _kept_mask(self) -> Tensor:
        return self._mask()

    def _mask(self) -> Tensor:
        key_S = torch.arange(self.num_keys, device=self.first_BT.device)
        seen_BTS = (key_S >= self.first_BT.unsqueeze(-1)) & (key_S <= self.last_BT.unsqueeze(-1))
        return seen_BTS.unsqueeze(1)

    def of(self, queries: slice, keys: slice) -> KeyRanges:
        """The ranges of some queries over some keys, which are numbered from 0."""
        start, stop, _ = keys.indices(self.num_keys)
        return KeyRanges(
            first_BT=self.first_BT[:, queries] - start,
            last_BT=self.last_BT[:, queries] - start,
            num_keys=max(0, stop - start),
        )


def key_ranges(
    documents_BS: Tensor | None, *, window: int = 0, order_T: Tensor | None = None, num_keys: int | None = None
) -> KeyRanges:
    """Ranges of queries at positions `order_T` of sequences of `num_keys` tokens; unless given, all of the documents.

    `documents_BS` are equal within a document, whose tokens are next to each other; None: one document.
    `window`: keys that a query sees at most, itself included; 0: all.

    >>> found = key_ranges(torch.tensor([[4, 4, 7, 7]]))
    >>> found.first_BT.tolist(), found.last_BT.tolist()
    ([[0, 0, 2, 2]], [[0, 1, 2, 3]])
    """
    if num_keys is None or order_T is None:
        assert documents_BS is not None
        num_keys = documents_BS.shape[1] if num_keys is None else num_keys
        order_T = torch.arange(num_keys, device=documents_BS.device) if order_T is None else order_T
    last_1T = order_T.to(torch.int32).unsqueeze(0)
    if documents_BS is None:
        first_BT = torch.zeros_like(last_1T)
    else:
        index_S = torch.arange(num_keys, device=documents_BS.device, dtype=torch.int32)
        changes_BS = torch.ones_like(documents_BS, dtype=torch.bool)
        changes_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        start_BS = torch.where(changes_BS, index_S, 0).cummax(dim=1).values
        first_BT = start_BS[:, order_T].to(torch.int32)
    if window:
        first_BT = torch.maximum(first_BT, last_1T - (window - 1))
    return KeyRanges(
        first_BT=first_BT.contiguous(), last_BT=last_1T.expand_as(first_BT).contiguous(), num_keys=num_keys
    )
