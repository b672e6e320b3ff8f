"""Weights for the models of transformers that parity tests compare with."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw all parameters and buffers: norms near one, all others wide enough that no part of the model is idle."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.uniform_(0.5, 1.5)
        elif "inv_freq" not in name and "embed_scale" not in name:
            tensor.normal_(0, 0.3)
