"""A frozen matrix W [out, in] in 8 or 4 bits: it multiplies in the format of its input and is never trained.

    int8         W[o, i] = s[o] c[o, i]       s[o] = max |W[o, :]| / 127, c whole numbers       error <= s[o] / 2
    nf4          W[n] = a[n // 64] v[c[n]]    a the largest of 64 neighbours, v 16 quantiles of the normal distribution
    nf4_double   a[b] = m + t[b // 256] d[b]  m the mean of all a, t = max |a - m| / 127 of 256 neighbours, d in 8 bits

W is dequantised again for the backward pass, so that at any time only one matrix is whole. Sources: Dettmers et al.
2022 (LLM.int8()), section 2; Dettmers et al. 2023 (QLoRA), section 3 and appendix E, whose d is an 8-bit float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.kernels.linear import linear, matmul_nt
from meshwright.kernels.traffic import LOOKED_UP_AT_ONCE
from meshwright.specs.model import NF4_BLOCK, SCALE_BLOCK, BaseFormat

LARGEST = 127
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
    outer_scales: Tensor  # of the scales, under double quantisation
    mean_scale: Tensor

    def __init__(self, out_features: int, in_features: int, *, kind: BaseFormat) -> None:
        super().__init__()
        assert kind is not BaseFormat.FULL
        self.shape = (out_features, in_features)
        self.kind = kind
        num_blocks = -(-out_features * in_features // NF4_BLOCK)
        if kind is BaseFormat.INT8:
            self._hold("codes", *self.shape, dtype=torch.int8)
            self._hold("scales", out_features, 1)
            return
        self._hold("codes", num_blocks, NF4_BLOCK // 2, dtype=torch.uint8)  # two codes a byte
        is_double = kind is BaseFormat.NF4_DOUBLE
        self._hold("scales", num_blocks, 1, dtype=torch.int8 if is_double else torch.float32)
        if is_double:
            self._hold("outer_scales", -(-num_blocks // SCALE_BLOCK), 1)
            self._hold("mean_scale", 1)

    def _hold(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """`input` times the transposed matrix."""
        return _FrozenGemm.apply(input, self)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantise `weight` and hold it."""
        weight = weight.to(device=self.codes.device, dtype=torch.float32)
        if self.kind is BaseFormat.INT8:
            scales, codes = _rounded(weight)
            self.scales.copy_(scales)
            self.codes.copy_(codes)
            return
        weight = _in_blocks(weight, NF4_BLOCK)
        scales = weight.abs().amax(dim=1, keepdim=True)
        values = torch.tensor(NORMAL_FLOAT, device=weight.device)
        nearest = torch.bucketize(_over(weight, scales), (values[1:] + values[:-1]) / 2).to(torch.uint8)
        self.codes.copy_(nearest[:, 0::2] << 4 | nearest[:, 1::2])
        if self.kind is BaseFormat.NF4_DOUBLE:
            self.mean_scale.copy_(scales.mean())
            outer, codes = _rounded(_in_blocks(scales - self.mean_scale, SCALE_BLOCK))
            self.outer_scales.copy_(outer)
            scales = codes.view(-1, 1)[: len(scales)]
        self.scales.copy_(scales)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in]."""
        if self.kind is BaseFormat.INT8:
            return torch.mul(self.codes, self.scales, out=torch.empty_like(self.codes, dtype=dtype))
        scales = self._scales()
        pairs = torch.tensor([(a, b) for a in NORMAL_FLOAT for b in NORMAL_FLOAT], device=self.codes.device)
        found = torch.empty(len(scales), NF4_BLOCK, dtype=dtype, device=self.codes.device)
        step = LOOKED_UP_AT_ONCE // NF4_BLOCK
        for codes, some, out in zip(self.codes.split(step), scales.split(step), found.split(step), strict=True):
            unit = pairs.index_select(0, codes.flatten().int()).view(-1, NF4_BLOCK)
            torch.mul(unit, some, out=out)
        out_features, in_features = self.shape
        return found.flatten()[: out_features * in_features].view(self.shape)

    def _scales(self) -> Tensor:
        """The scales of all blocks in fp32."""
        if self.kind is BaseFormat.NF4:
            return self.scales
        inner = _in_blocks(self.scales.float(), SCALE_BLOCK) * self.outer_scales + self.mean_scale
        return inner.view(-1, 1)[: len(self.scales)]


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """`values` in rows of `size`, the last one filled with zeros."""
    return functional.pad(values.flatten(), (0, -values.numel() % size)).view(-1, size)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each row, and its values over the scale as whole numbers of 8 bits."""
    scales = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    return scales, _over(rows, scales).round()


def _over(rows: Tensor, scales: Tensor) -> Tensor:
    return rows / scales.clamp(min=torch.finfo(torch.float32).tiny)


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
