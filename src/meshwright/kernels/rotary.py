"""Rotary position embedding (Su et al. 2021) of queries and keys in one pass.

    contiguous   (x_j, x_{j + J}) turns by angle j
    interleaved  (x_{2j}, x_{2j+1}) turns by angle j; the result is in contiguous order

Queries and keys are reordered alike, so their scores do not change. Columns from 2 J on stay as they are. The
gradient turns back. Angles are fp32: in bf16 they blur positions beyond a few thousand tokens.

B sequences, T tokens, H query heads, G key heads, K width of a head, J = R / 2 frequencies of its rotary part R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.kernels import liger
from meshwright.kernels.dispatch import choose
from meshwright.kernels.routes import Route
from meshwright.kernels.shapes import require_format, require_shapes
from meshwright.kernels.triton_route import serves_triton


def rotate(
    q_BTHK: Tensor, k_BTGK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, turned by the angles of their tokens, in their shapes and formats."""
    require_shapes("rotary", q_BTHK=q_BTHK, k_BTGK=k_BTGK)
    require_shapes("rotary", cos_BT1J=cos_BT1J, sin_BT1J=sin_BT1J)
    require_format("rotary", q=q_BTHK, k=k_BTGK)
    (batch, tokens, _, width), (batches, angles, _, num_pairs) = q_BTHK.shape, cos_BT1J.shape
    if batches not in (1, batch) or angles != tokens or 2 * num_pairs > width:
        got = f"angles {tuple(cos_BT1J.shape)} of queries {tuple(q_BTHK.shape)}"
        raise InputError("rotary: angles are [B or 1, T, 1, J], J at most half the width of a head", got=got)
    route = choose("rotary", q_BTHK, k_BTGK, flags=frozenset({"interleaved"} if is_interleaved else ()))
    return ROUTES["rotary"][route].function(q_BTHK, k_BTGK, cos_BT1J, sin_BT1J, is_interleaved)


def reference(
    q_BTHK: Tensor, k_BTGK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The specification."""
    return (
        rotated(q_BTHK, cos_BT1J, sin_BT1J, is_interleaved=is_interleaved),
        rotated(k_BTGK, cos_BT1J, sin_BT1J, is_interleaved=is_interleaved),
    )


def rotated(x_BTHK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, *, is_interleaved: bool) -> Tensor:
    """One of the two, in plain PyTorch."""
    num_pairs = cos_BT1J.shape[-1]
    plain_dim = x_BTHK.shape[-1] - 2 * num_pairs
    if is_interleaved:
        turning, plain = x_BTHK.split([2 * num_pairs, plain_dim], dim=-1)
        first_BTHJ, second_BTHJ = turning[..., 0::2], turning[..., 1::2]
    else:
        first_BTHJ, second_BTHJ, plain = x_BTHK.split([num_pairs, num_pairs, plain_dim], dim=-1)
    turned = (first_BTHJ * cos_BT1J - second_BTHJ * sin_BT1J, second_BTHJ * cos_BT1J + first_BTHJ * sin_BT1J)
    return torch.cat((*turned, plain) if plain_dim else turned, dim=-1).to(x_BTHK.dtype)


def _triton(
    q_BTHK: Tensor, k_BTGK: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    from meshwright.kernels.rotary_triton import rotated_pair

    return rotated_pair(q_BTHK, k_BTGK, cos_BT1J, sin_BT1J, is_interleaved, False)


ROUTES = {
    "rotary": {
        "reference": Route(reference),
        "triton": Route(_triton, serves=serves_triton),
        "liger": Route(liger.rotate, serves=liger.serves_rotary),
    }
}
