"""LoRA under tensor parallelism: W and its adapter A, B are sharded on the same side.

    by columns   W [out/t, in]   A [r, in] whole    B [out/t, r]    y_local = x W^T + s x A^T B^T
    by rows      W [out, in/t]   A [r, in/t]        B [out, r] whole    y = sum over ranks of the same, local x

An adapter of query, key and value as one matrix has one A, replicated, and each part of its B sharded by columns.
By rows the output of the adapter is a partial sum like the matrix's own, so that both take one reduction. Replicated
matrices have partial gradients: a rank sees its own columns, or rows, only.

Source: Hu et al. 2021 (LoRA), section 4.1; Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from abc import abstractmethod

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.engines.native.parallel.mesh import sharded
from meshwright.kernels.linear import linear
from meshwright.training.models import LoraLinear, QkvAdapter, adapter_matrices
from meshwright.training.models.lora import frozen_part, resized, row_norms

OUT, IN = Shard(0), Shard(1)  # sides of a matrix [out, in]


class _Adapted(ParallelStyle):
    """A LoRA layer that computes on local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LoraLinear)
        for part, side in self.sides(module):
            part.weight = sharded(part.weight, device_mesh, side)
        if module.lora_magnitude is not None:
            module.lora_magnitude = sharded(module.lora_magnitude, device_mesh, self.bias)
        if module.bias is not None:
            module.bias = sharded(module.bias, device_mesh, self.bias)
        module.forward = lambda input: self.forward(module, input, device_mesh)
        return module

    bias: Placement  # of the magnitude of DoRA too

    @abstractmethod
    def sides(self, layer: LoraLinear) -> list[tuple[nn.Linear, Placement]]:
        """The three matrices with their placements."""

    @abstractmethod
    def forward(self, layer: LoraLinear, input: Tensor, mesh: DeviceMesh) -> Tensor:
        """The output of this rank."""


class LoraColwiseParallel(_Adapted):
    """Takes an input that is whole, or gathers it, and gives this rank's columns."""

    bias = OUT

    def sides(self, layer: LoraLinear) -> list[tuple[nn.Linear, Placement]]:
        return [(layer, OUT), (layer.lora_a, Replicate()), (layer.lora_b, OUT)]

    def forward(self, layer: LoraLinear, input: Tensor, mesh: DeviceMesh) -> Tensor:
        # The input stays a distributed tensor until here: layers that share it share its gradient's reduction.
        if isinstance(input, DTensor):
            input = input.redistribute(mesh, [Replicate()])
        x_BTD = _local(input, gradient=Partial())
        a, b = _local(layer.lora_a.weight, gradient=Partial()), _local(layer.lora_b.weight)
        bias = None if layer.bias is None else _local(layer.bias)
        out = linear(x_BTD, _local(layer.weight), bias)
        if layer.is_off:
            return out
        dropped_BTD = layer.dropout(x_BTD)
        update = _adapted(dropped_BTD, a, b, scale=layer.scale)
        if layer.lora_magnitude is None:
            return out + update
        weight = _local(layer.weight)
        plain = frozen_part(layer, out, dropped_BTD, weight=weight, bias=bias)
        norms = row_norms(weight, a, b, scale=layer.scale)
        return out + resized(plain, update, _local(layer.lora_magnitude) / norms)


class LoraRowwiseParallel(_Adapted):
    """Takes this rank's columns of the input and gives the sum over ranks, with the placement `output`."""

    bias = Replicate()

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def sides(self, layer: LoraLinear) -> list[tuple[nn.Linear, Placement]]:
        return [(layer, IN), (layer.lora_a, IN), (layer.lora_b, Replicate())]

    def forward(self, layer: LoraLinear, input: Tensor, mesh: DeviceMesh) -> Tensor:
        x_BTD = _local(input)
        a, b = _local(layer.lora_a.weight), _local(layer.lora_b.weight, gradient=Partial())
        partial = linear(x_BTD, _local(layer.weight))
        if not layer.is_off:
            dropped_BTD = _dropout(layer, x_BTD, mesh)
            update = _adapted(dropped_BTD, a, b, scale=layer.scale)
            if layer.lora_magnitude is not None:
                weight = _local(layer.weight)
                squares = row_norms(weight, a, b, scale=layer.scale).square()
                dist.all_reduce(squares, group=mesh.get_group())
                ratio = _local(layer.lora_magnitude, gradient=Partial()) / squares.sqrt()
                plain = frozen_part(layer, partial, dropped_BTD, weight=weight, bias=None)
                update = resized(plain, update, ratio)
            partial = partial + update
        whole = DTensor.from_local(partial, mesh, [Partial()], run_check=False)
        whole = whole.redistribute(mesh, [self.output]).to_local()
        return whole if layer.bias is None else whole + _local(layer.bias)


class QkvParallel(ParallelStyle):
    """An adapter of query, key and value as one matrix: this rank's columns of each."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, QkvAdapter)
        for name, matrix in adapter_matrices(module, prefix="qkv"):
            matrix.weight = sharded(matrix.weight, device_mesh, Replicate() if name.endswith(".lora_a") else OUT)

        def forward(input: Tensor) -> tuple[Tensor, ...]:
            if isinstance(input, DTensor):
                input = input.redistribute(device_mesh, [Replicate()])
            x_BTD = _local(input, gradient=Partial())
            a = _local(module.lora_a.weight, gradient=Partial())
            narrow_BTR = linear(module.dropout(x_BTD).to(a.dtype), a)
            parts = (_local(part.get_parameter("weight")) for part in module.lora_b.values())
            return tuple(linear(narrow_BTR, b).mul(module.scale).to(x_BTD.dtype) for b in parts)

        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        return module


def _adapted(x_BTD: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    return linear(linear(x_BTD.to(a.dtype), a), b).mul(scale).to(x_BTD.dtype)


def _dropout(layer: LoraLinear, x_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Dropout of this rank's columns. All ranks draw the same numbers, so each draws for all and keeps its own."""
    if not layer.training or not layer.dropout.p:
        return x_BTD
    *others, width = x_BTD.shape
    kept = layer.dropout(x_BTD.new_ones(*others, width * mesh.size()))
    return x_BTD * kept.narrow(-1, mesh.get_local_rank() * width, width)


def _local(tensor: Tensor, *, gradient: Placement | None = None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])
