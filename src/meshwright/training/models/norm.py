"""Norms of a model (`kernels.rms_norm`), alone and with the addition to the residual stream before them."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.kernels.rms_norm import add_rms_norm, rms_norm
from meshwright.specs.model import Model


class Norm(nn.RMSNorm):
    """An RMSNorm with the routes of `kernels`. `is_zero_centered`: it multiplies by 1 + weight."""

    def __init__(self, width: int, *, eps: float, is_zero_centered: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.epsilon, self.is_zero_centered = eps, is_zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """As `x`."""
        return self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        """The norm of `x`."""
        return rms_norm(x, self.plain(self.weight), epsilon=self.epsilon, zero_centered=self.is_zero_centered)

    def plain(self, parameter: Tensor) -> Tensor:
        """`parameter` as a plain tensor: tensor parallelism replaces this."""
        return parameter


class ResidualNorm(Norm):
    """The norm of a residual stream to which a branch (attention) is added before."""

    def forward(  # ty: ignore[incompatible-method-override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual."""
        return add_rms_norm(
            x, residual, self.plain(self.weight), epsilon=self.epsilon, zero_centered=self.is_zero_centered
        )


class ResidualSum(nn.Module):
    """The addition without a norm, in a layer that normalises outputs alone."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, twice."""
        total = x + residual
        return total, total


def make_norm(model: Model, *, width: int, adds_residual: bool = False) -> Norm:
    """The norm of `model` over vectors of `width`."""
    kind = ResidualNorm if adds_residual else Norm
    return kind(width, eps=model.norm_epsilon, is_zero_centered=model.zero_centered_norms)
