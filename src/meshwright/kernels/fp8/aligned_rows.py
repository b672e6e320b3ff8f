"""Rows sorted by expert, with rows of zeros between experts: each has a multiple of some number of rows.

    rows        0 0 0 | 1 1 | 2 2 2 2 2                     counts 3 2 5
    aligned     0 0 0 . | 1 1 . . | 2 2 2 2 2 . . .         counts 4 4 8, by fours

The number of aligned rows does not depend on the counts, which stay on the device. M rows of E experts get
(floor(M / alignment) + E) times the alignment. Rows behind the last expert are zeros. `experts.permutation`
writes and reads rows in this order: alignment costs no pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedRows:
    """P rows: M pairs sorted by expert, and rows of zeros."""

    order_P: Tensor  # the pair of every row; -1 for one of zeros
    expert_P: Tensor  # of every row; E for one of zeros
    counts_E: Tensor  # of an expert, with the rows of zeros behind its own

    def of_rows(self, values_EN: Tensor) -> Tensor:
        """[P, N]: the value of each row's expert; 0 for rows of zeros."""
        return torch.cat([values_EN, values_EN.new_zeros(1, values_EN.shape[1])])[self.expert_P]


@torch.no_grad()
def align(order_M: Tensor, counts_E: Tensor, *, alignment: int) -> AlignedRows:
    """Place the pairs of `order_M`, which sorts them by expert.

    >>> found = align(torch.tensor([1, 2, 0, 4, 3]), torch.tensor([3, 2]), alignment=4)
    >>> found.order_P.tolist(), found.counts_E.tolist()
    ([1, 2, 0, -1, 4, 3, -1, -1, -1, -1, -1, -1], [4, 4])
    """
    num_rows, num_experts, device = len(order_M), len(counts_E), order_M.device
    expert_M = torch.arange(num_experts, device=device).repeat_interleave(counts_E, output_size=num_rows)
    aligned_E = (counts_E + alignment - 1) // alignment * alignment
    added_E = aligned_E - counts_E
    place_M = torch.arange(num_rows, device=device) + (added_E.cumsum(0) - added_E)[expert_M]
    total = (num_rows // alignment + num_experts) * alignment
    order_P, expert_P = (torch.full((total,), empty, device=device) for empty in (-1, num_experts))
    order_P[place_M], expert_P[place_M] = order_M, expert_M
    return AlignedRows(order_P=order_P, expert_P=expert_P, counts_E=aligned_E)
