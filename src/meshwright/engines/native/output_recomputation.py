"""Outputs that are dropped and made again when the backward pass asks for them.

A cheap function between two expensive ones (a norm before projections, the activation before the last matrix, the
up-projection of MLA before attention) has an output that only its consumers keep. `checkpoint` around the function
would not free it: it frees what is inside. So here the consumers' saved tensors are looked at: those that are the
output are replaced by a note of how to make it again, once for all consumers.

    y = drop(f, x)        inside `recomputing_outputs(...)`
    z = g(y)              g would keep y for its backward pass; it keeps (f, x) instead

The function itself is differentiated as always; what it keeps are its inputs, which somebody keeps anyway. Nothing is
computed twice when the backward pass is split into gradients of inputs and of weights.

The idea is Megatron-Core's "output-discarding checkpointing"; PyTorch's saved-tensor hooks make it four functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


class _Again:
    """One call of a function: its outputs are made again when the first of their consumers asks."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        self.outputs: tuple[Tensor, ...] | None = None
        self.num_kept = self.num_left = 0

    def output(self, index: int) -> Tensor:
        """Output `index`; the last consumer's question lets the outputs go."""
        if self.outputs is None:
            with torch.no_grad():
                self.outputs = _as_tuple(self.function(*self.inputs))
            self.num_left = self.num_kept
        output = self.outputs[index]
        self.num_left -= 1
        if self.num_left <= 0:
            self.outputs = None
        return output


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What a consumer keeps in place of an output, or of a view of it."""

    again: _Again
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: DTensor | None  # a distributed tensor around it, on the meta device


_dropped: dict[int, tuple[Any, _Again, int]] = {}
"""Outputs by address while they exist: a weak reference, how to make them again, and which one they are."""


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, a tensor or a tuple of them, which consumers inside `recomputing_outputs` will not keep."""
    outputs = function(*inputs)
    if torch.is_grad_enabled():
        again = _Again(function, inputs)
        for index, output in enumerate(_as_tuple(outputs)):
            if address := _address(output):
                _dropped[address] = (ref(output), again, index)
    return outputs


@contextmanager
def recomputing_outputs() -> Iterator[None]:
    """While this is open, saved tensors that `recomputed` made are replaced by notes."""
    before = dict(_dropped)
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _dropped.clear()
        _dropped.update(before)


def _pack(kept: Tensor) -> Tensor | _Note:
    local = kept.to_local() if isinstance(kept, DTensor) else kept
    alive, again, index = _dropped.get(_address(local), (None, None, 0))
    if alive is None or again is None or alive() is None:
        return kept
    again.num_kept += 1
    return _Note(
        again=again,
        index=index,
        size=local.size(),
        stride=local.stride(),
        offset=local.storage_offset(),
        wrapped=_shell(kept) if isinstance(kept, DTensor) else None,
    )


def _unpack(kept: Tensor | _Note) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    output = kept.again.output(kept.index).detach()
    local = output.as_strided(kept.size, kept.stride, kept.offset)
    if kept.wrapped is None:
        return local
    shell = kept.wrapped
    return DTensor.from_local(
        local, shell.device_mesh, shell.placements, run_check=False, shape=shell.shape, stride=shell.stride()
    )


def _shell(kept: DTensor) -> DTensor:
    local = torch.empty_strided(kept.to_local().size(), kept.to_local().stride(), device="meta")
    return DTensor.from_local(
        local, kept.device_mesh, kept.placements, run_check=False, shape=kept.shape, stride=kept.stride()
    )


def _address(tensor: Tensor) -> int:
    """Where its elements are; 0 where it has none, or stands for another (a collective that is under way)."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
