"""Activations kept in 8 bits between the forward and the backward pass.

Tensors that autograd saves inside the context are quantised by blocks of 128 values of their last dimension,
and dequantised when the backward pass asks for them: 1 byte and 1/32 of scales a value instead of 2 (bf16) or
4 (fp32). The forward pass is unchanged; the gradients of weights and of element-wise functions see rounded
inputs.

    format    step within a block                              error of a normal variable
    int8      max / 127 for all values                         0.7 %
    e4m3      1/16 of the value                                2.6 %

Recomputation has no error and costs the forward pass again; this costs a cast and its inverse.

Not quantised: parameters and views of them (the module holds their storage), tensors of fewer than `SMALLEST`
values, integers, and 8-bit formats. A tensor that several functions save (the input of gate and up) is kept
once: the open context holds the original, so that no other tensor takes its memory. Magnitudes below 1e-36
lose their precision. Source: Chen et al. 2021 (ActNN).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.fp8.formats import Element, Quantized, ScaledValues, Scaling, quantize, spread

SMALLEST = 4096
LARGEST_INT8 = 127
WIDE = (torch.bfloat16, torch.float16, torch.float32)


class StoredFormat(StrEnum):
    """Format of stored activations."""

    INT8 = "int8"
    E4M3 = "e4m3"


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredActivation(ScaledValues):
    """A tensor in 8 bits [M, K] with scales [M, ceil(K / 128)] in fp32, its shape and format."""

    shape: torch.Size
    dtype: torch.dtype
    format: StoredFormat

    def restored(self) -> Tensor:
        """The tensor, rounded."""
        rows, columns = self.values.shape
        if self.format is StoredFormat.E4M3:
            found = Quantized(
                values=self.values,
                scales=self.scales,
                element=Element.E4M3,
                scaling=Scaling.BLOCK,
                shape=(rows, columns),
            ).dequantized(self.dtype)
        else:
            scales = spread(self.scales, rows=rows, columns=columns, scaling=Scaling.BLOCK)
            found = (self.values * scales).to(self.dtype)
        return found.view(self.shape)


@torch.no_grad()
def stored(x: Tensor, *, format: StoredFormat) -> StoredActivation:
    """Return `x` in 8 bits. A block with a value that is not finite becomes NaN."""
    columns = x.shape[-1]
    x_MK = x.reshape(x.numel() // columns if columns else 0, columns)
    common: dict[str, Any] = {"shape": x.shape, "dtype": x.dtype, "format": format}
    found = quantize(x_MK, element=Element.E4M3, scaling=Scaling.BLOCK)
    if format is StoredFormat.E4M3:
        return StoredActivation(values=found.values, scales=found.scales, **common)
    scales = found.scales * (448.0 / LARGEST_INT8)
    unit = x_MK / spread(scales, rows=x_MK.shape[0], columns=x_MK.shape[1], scaling=Scaling.BLOCK)
    return StoredActivation(values=unit.nan_to_num().round().to(torch.int8), scales=scales, **common)


@contextmanager
def storing_activations(*owners: nn.Module, format: StoredFormat) -> Iterator[None]:
    """Keep tensors that autograd saves in the open context in `format`; parameters of `owners` keep theirs."""
    kept_whole = {p.untyped_storage().data_ptr() for owner in owners for p in owner.parameters()}
    known: dict[tuple[Any, ...], tuple[Tensor, StoredActivation]] = {}

    def pack(x: Tensor) -> Tensor | StoredActivation:
        is_plain = type(x) is Tensor and x.dtype in WIDE and x.numel() >= SMALLEST and x.dim() > 0
        if not is_plain or x.untyped_storage().data_ptr() in kept_whole:
            return x
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        if key not in known:
            known[key] = x, stored(x, format=format)
        return known[key][1]

    def unpack(kept: Tensor | StoredActivation) -> Tensor:
        return kept.restored() if isinstance(kept, StoredActivation) else kept

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        known.clear()


def store_activations(module: nn.Module, *, format: StoredFormat) -> None:
    """Make `module` keep its activations in `format`, in place: its forward runs in the context."""
    forward = module.forward

    def run(*inputs: Any, **options: Any) -> Any:
        with storing_activations(module, format=format):
            return forward(*inputs, **options)

    module.forward = run
