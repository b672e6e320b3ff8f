"""Rows sorted by expert, with rows of zeros between experts: each has a multiple of some number of rows.

    rows        0 0 0 | 1 1 | 2 2 2 2 2                     counts 3 2 5
    aligned     0 0 0 . | 1 1 . . | 2 2 2 2 2 . . .         counts 4 4 8, by fours

Their number does not depend on the counts, which stay on the device: floor(M / alignment) + E times the alignment, for
M rows of E experts. What is behind the last expert is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedRows:
    """Places of M rows among P."""

    counts_E: Tensor  # of an expert, with the rows of zeros behind its own
    num_rows: int  # P
    expert_P: Tensor  # of every row; E for one of zeros
    place_M: Tensor

    def spread(self, rows_MD: Tensor) -> Tensor:
        """[P, D]: the rows at their places."""
        return _Spread.apply(rows_MD, self.place_M, self.num_rows)

    def gather(self, rows_PD: Tensor) -> Tensor:
        """[M, D]: the inverse of `spread`."""
        return _Gather.apply(rows_PD, self.place_M)

    def of_rows(self, values_EN: Tensor) -> Tensor:
        """[P, N]: the value of each row's expert; 0 for rows of zeros."""
        return torch.cat([values_EN, values_EN.new_zeros(1, values_EN.shape[1])])[self.expert_P]


def align(counts_E: Tensor, *, num_rows: int, alignment: int) -> AlignedRows:
    """Plan the places of `num_rows` rows sorted by expert.

    >>> found = align(torch.tensor([3, 2, 5]), num_rows=10, alignment=4)
    >>> found.counts_E.tolist(), found.num_rows, found.place_M.tolist()
    ([4, 4, 8], 20, [0, 1, 2, 4, 5, 8, 9, 10, 11, 12])
    """
    num_experts = len(counts_E)
    experts_E = torch.arange(num_experts, device=counts_E.device)
    expert_M = experts_E.repeat_interleave(counts_E, output_size=num_rows)
    aligned_E = (counts_E + alignment - 1) // alignment * alignment
    added_E = aligned_E - counts_E
    place_M = torch.arange(num_rows, device=counts_E.device) + (added_E.cumsum(0) - added_E)[expert_M]
    total = (num_rows // alignment + num_experts) * alignment
    expert_P = torch.full((total,), num_experts, device=counts_E.device)
    expert_P[place_M] = expert_M
    return AlignedRows(counts_E=aligned_E, num_rows=total, expert_P=expert_P, place_M=place_M)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, place_M: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(place_M)
        out_PD = rows_MD.new_zeros(num_rows, rows_MD.shape[1])
        out_PD[place_M] = rows_MD
        return out_PD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_M,) = ctx.saved_tensors
        return grads[0][place_M], None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.num_rows = len(rows_PD)
        return rows_PD[place_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place_M,) = ctx.saved_tensors
        out_PD = grads[0].new_zeros(ctx.num_rows, grads[0].shape[1])
        out_PD[place_M] = grads[0]
        return out_PD, None
