"""Norms (RMSNorm, Zhang and Sennrich 2019).

y = w x / rms(x)          or  (1 + w) x / rms(x)  where the model's norms are centered at zero
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.specs.model import Model


class ZeroCenteredNorm(nn.RMSNorm):
    """A norm that multiplies by 1 + weight, in fp32: in bf16 the sum would lose what training changes."""

    def forward(self, x: Tensor) -> Tensor:
        """As `x`."""
        weight = 1 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(model: Model, *, width: int) -> nn.RMSNorm:
    """The norm of `model` over vectors of `width`."""
    kind = ZeroCenteredNorm if model.zero_centered_norms else nn.RMSNorm
    return kind(width, eps=model.norm_epsilon)
