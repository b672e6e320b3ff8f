"""Output recomputation: outputs of cheap functions are not saved but recomputed in the backward pass.

A cheap function between two expensive ones (a norm before projections, the activation before the last matrix, the
up-projection of MLA before attention) has an output that only its consumers save. `checkpoint` around the function
would not free it: it frees the tensors inside. So here hooks inspect the tensors that consumers save: those that are
the output are replaced by a reference to its function and inputs, from which it is recomputed once for all consumers.

    y = drop(f, x)        inside `recomputing_outputs(...)`
    z = g(y)              g would save y for its backward pass; it saves (f, x) instead

The function itself is differentiated as usual; it saves its inputs, which are saved elsewhere anyway. Nothing is
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


class _Call:
    """One call of a function: its outputs are recomputed when the first consumer needs one."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        self.outputs: tuple[Tensor, ...] | None = None
        self.num_kept = self.num_left = 0

    def output(self, index: int) -> Tensor:
        """Return output `index`. The last consumer frees the outputs."""
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
class _Reference:
    """Saved by a consumer in place of an output, or of a view of it."""

    call: _Call
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: DTensor | None  # a distributed tensor around it, on the meta device


_recomputable: dict[int, tuple[Any, _Call, int]] = {}
"""Outputs by address while they exist: a weak reference, the call that made them, and their index among its outputs."""


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, a tensor or a tuple of them, which consumers inside `recomputing_outputs` will not keep."""
    outputs = function(*inputs)
    discard(outputs, function=function, inputs=inputs)
    return outputs


def discard(outputs: Any, *, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Make consumers inside `recomputing_outputs` not keep `outputs`, which `function(*inputs)` gives again."""
    if not torch.is_grad_enabled():
        return
    call = _Call(function, inputs)
    for index, output in enumerate(_as_tuple(outputs)):
        if address := _address(output):
            _recomputable[address] = (ref(output), call, index)


@contextmanager
def recomputing_outputs() -> Iterator[None]:
    """While this is open, saved tensors that `recomputed` made are replaced by notes."""
    before = dict(_recomputable)
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _recomputable.clear()
        _recomputable.update(before)


def _pack(saved: Tensor) -> Tensor | _Reference:
    local = saved.to_local() if isinstance(saved, DTensor) else saved
    alive, call, index = _recomputable.get(_address(local), (None, None, 0))
    if alive is None or call is None or alive() is None:
        return saved
    call.num_kept += 1
    return _Reference(
        call=call,
        index=index,
        size=local.size(),
        stride=local.stride(),
        offset=int(local.storage_offset()),
        wrapped=_shell(saved) if isinstance(saved, DTensor) else None,
    )


def _unpack(saved: Tensor | _Reference) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    output = saved.call.output(saved.index).detach()
    local = output.as_strided(saved.size, saved.stride, saved.offset)
    if saved.wrapped is None:
        return local
    shell = saved.wrapped
    return DTensor.from_local(
        local, shell.device_mesh, shell.placements, run_check=False, shape=shell.shape, stride=shell.stride()
    )


def _shell(kept: DTensor) -> DTensor:
    local = torch.empty_strided(kept.to_local().size(), kept.to_local().stride(), device="meta")
    return DTensor.from_local(
        local, kept.device_mesh, kept.placements, run_check=False, shape=kept.shape, stride=kept.stride()
    )


def _address(tensor: Tensor) -> int:
    """Address of its storage; 0 for a tensor without one, such as the result of an asynchronous collective."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
