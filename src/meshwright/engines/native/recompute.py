"""Activation recomputation: keep a layer's input, run its forward pass again in the backward pass.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.specs.plan import Plan, Recompute


def recompute(layers: Sequence[nn.Module], *, plan: Plan) -> None:
    """Make the layers that `plan` names compute again; they keep their names.

    The forward method is replaced, not the module: hooks of FSDP stay around it, so that a layer's weights are
    gathered once for its recomputation and its backward pass.
    """
    if plan.recompute is not Recompute.FULL:
        return
    count = len(layers) if plan.recompute_layers is None else plan.recompute_layers
    for layer in layers[:count]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
