"""A frozen matrix W [out, in] in 8 or 4 bits: it multiplies in the format of its input and is never trained.

    int8   W[o, i] = s[o] c[o, i]       s[o] = max |W[o, :]| / 127, c whole numbers       error <= s[o] / 2
    nf4    W[n] = a[n // 64] v[c[n]]    a the largest of 64 neighbours, v 16 quantiles of the normal distribution

W is dequantised again for the backward pass, so that at any time only one matrix is whole. Sources: Dettmers et al.
2022 (LLM.int8()), section 2; Dettmers et al. 2023 (QLoRA), section 3 and appendix E, without double quantisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.kernels.linear import linear, matmul_nt
from meshwright.specs.model import BaseFormat

LARGEST = 127
BLOCK = 64
NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class QuantizedWeight(nn.Module):
    """The codes and scales of one matrix. Buffers, so that neither the optimizer nor a checkpoint holds them."""

    codes: Tensor
    scales: Tensor

    def __init__(self, out_features: int, in_features: int, *, kind: BaseFormat) -> None:
        super().__init__()
        assert kind is not BaseFormat.FULL
        self.shape = (out_features, in_features)
        self.kind = kind
        num_blocks = -(-out_features * in_features // BLOCK)
        if kind is BaseFormat.INT8:
            codes, scales = torch.empty(self.shape, dtype=torch.int8), torch.empty(out_features, 1)
        else:  # two codes a byte
            codes, scales = torch.empty(num_blocks, BLOCK // 2, dtype=torch.uint8), torch.empty(num_blocks, 1)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales.float(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """`input` times the transposed matrix."""
        return _FrozenGemm.apply(input, self)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantise `weight` and hold it."""
        weight = weight.to(device=self.codes.device, dtype=torch.float32)
        if self.kind is BaseFormat.INT8:
            scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        else:
            weight = functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
            scales = weight.abs().amax(dim=1, keepdim=True)
        unit = weight / scales.clamp(min=torch.finfo(torch.float32).tiny)
        self.scales.copy_(scales)
        if self.kind is BaseFormat.INT8:
            self.codes.copy_(unit.round())
            return
        values = torch.tensor(NORMAL_FLOAT, device=unit.device)
        nearest = torch.bucketize(unit, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        self.codes.copy_(nearest[:, 0::2] << 4 | nearest[:, 1::2])

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in]."""
        if self.kind is BaseFormat.INT8:
            return (self.codes * self.scales).to(dtype)
        values = torch.tensor(NORMAL_FLOAT, device=self.codes.device)
        pairs = torch.stack([self.codes >> 4, self.codes & 15], dim=-1)
        unit = values.index_select(0, pairs.flatten().int()).view(-1, BLOCK)
        out_features, in_features = self.shape
        return (unit * self.scales).flatten()[: out_features * in_features].view(self.shape).to(dtype)


class _FrozenGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return linear(input, weight.whole(input.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        weight_NK = ctx.weight.whole(grad.dtype)
        return matmul_nt(rows, weight_NK.T).view(*grad.shape[:-1], weight_NK.shape[1]), None
