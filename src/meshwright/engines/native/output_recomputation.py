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

`from_inputs` is the checkpoint of Chen et al. 2016: a function saves none of its tensors. The backward pass runs it
again when it needs the first of them, up to the last of them. PyTorch's own checkpoint does the same. It also compares
shapes, holds every tensor by a weak reference and imports the compiler, which costs more than a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.training.distributed_tensors import is_distributed, own_part


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


class _AllMadeError(Exception):
    """The last tensor that a backward pass needs has been made."""


class _Inputs(torch.autograd.Function):
    """A node that saves tensors as any operation does: hooks around it, which offload or reference, see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save the tensors; the anchor requires a gradient, so that there is a node."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Region:
    """One call of a function that saves none of its tensors: the backward pass makes them again from the inputs."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], again: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.function, self.again = function, again
        are_tensors = [isinstance(x, Tensor) for x in inputs]
        self.wants_grad = [x.requires_grad if is_one else None for x, is_one in zip(inputs, are_tensors, strict=True)]
        tensors = (x for x, is_one in zip(inputs, are_tensors, strict=True) if is_one)
        self.saved: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self.others = [None if is_one else x for x, is_one in zip(inputs, are_tensors, strict=True)]
        self.num_saved = 0
        self.made: dict[int, Tensor] = {}

    def pack(self, _: Tensor) -> int:
        """Save the number of a tensor in its place."""
        self.num_saved += 1
        return self.num_saved - 1

    def unpack(self, index: int) -> Tensor:
        """Return tensor `index`, and keep it no longer."""
        if index not in self.made:
            self._make()
        return self.made.pop(index)

    def _make(self) -> None:
        made: list[Tensor] = []

        def pack(saved: Tensor) -> Tensor:
            made.append(saved.detach() if saved.requires_grad else saved)
            if len(made) == self.num_saved:
                raise _AllMadeError
            return made[-1]

        saved = iter(self.saved.saved_tensors)
        inputs = [
            x if wants_grad is None else next(saved).detach().requires_grad_(wants_grad)
            for x, wants_grad in zip(self.others, self.wants_grad, strict=True)
        ]
        with suppress(_AllMadeError), torch.enable_grad(), self.again(), saved_tensors_hooks(pack, _as_it_is):
            self.function(*inputs)
        self.made = dict(enumerate(made))


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def from_inputs(
    function: Callable[..., Any], *inputs: Any, again: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Any:
    """`function(*inputs)`, which saves its inputs alone. `again()` is open while it computes a second time."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, inputs, again)
    with saved_tensors_hooks(region.pack, region.unpack):
        return function(*inputs)


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """Saved by a consumer in place of an output, or of a view of it."""

    call: _Call
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any  # of a distributed tensor around it; None: there is none


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
    local = own_part(saved)
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
        spec=saved._spec if is_distributed(saved) else None,
    )


def _unpack(saved: Tensor | _Reference) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    output = saved.call.output(saved.index).detach()
    local = output.as_strided(saved.size, saved.stride, saved.offset)
    if saved.spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, saved.spec, requires_grad=False)


def _address(tensor: Tensor) -> int:
    """Address of its storage; 0 for a tensor without one, such as the result of an asynchronous collective."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
