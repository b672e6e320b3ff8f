"""Activations of whole layers in host memory, between a layer's forward pass and its backward pass.

    forward     what autograd keeps of a layer is copied out behind the layer, while the next one runs, and freed
                before the one after that
    backward    as the backward pass of a layer begins, what was kept of the layer below is copied back

So two layers are on the device at once, the running one and the copied one: the last two are never offloaded, as
`cost.memory` counts. Of a recomputed layer its input is what autograd keeps.

Tensors that share memory are copied once. Parameters, arguments that all layers share and small tensors stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.training.distributed_tensors import is_distributed
from meshwright.training.host_memory import HostCopies
from meshwright.training.masters import local_part

LEAST_BYTES = 2**16
"""Of memory that is worth a copy."""

RESIDENT = 2
"""Layers whose activations stay: the last ones, whose backward pass comes first."""


def num_offloaded(num_layers: int, *, share: float) -> int:
    """Return how many layers of a rank are offloaded, the first ones: `share` of those that need not stay, rounded up.

    >>> [num_offloaded(32, share=share) for share in (0, 0.1, 0.5, 1)]
    [0, 3, 15, 30]
    """
    return math.ceil(share * max(num_layers - RESIDENT, 0) - 1e-6)


def offload_activations(layers: Sequence[nn.Module], *, share: float, device: torch.device) -> None:
    """Make the first of `layers` keep `share` of their activations in host memory.

    Methods are replaced, not modules: names stay, and hooks of FSDP stay around them.
    """
    count = num_offloaded(len(layers), share=share)
    copies, kept = HostCopies(device), dict[int, LayerActivations]()
    for index, layer in enumerate(layers[: count + RESIDENT] if count else ()):
        layer.forward = _offloading(layer, index, count=count, kept=kept, copies=copies)


def _offloading(
    layer: nn.Module, index: int, *, count: int, kept: dict[int, LayerActivations], copies: HostCopies
) -> Callable[..., Tensor]:
    """The forward pass of layer `index`, of which the first `count` are offloaded. `kept`: of the newest passes."""
    forward = layer.forward

    def run(x_BTD: Tensor, *others: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x_BTD, *others)
        if index >= RESIDENT:
            kept[index - RESIDENT].leave()
        if index < count:
            kept[index] = here = LayerActivations(copies, staying=_storages(layer, others))
            with saved_tensors_hooks(here.pack, here.unpack):
                out_BTD = forward(x_BTD, *others)
            here.store()
        else:
            out_BTD = forward(x_BTD, *others)
        if 0 < index <= count and out_BTD.requires_grad:
            below = kept[index - 1]
            out_BTD.register_hook(lambda _: below.fetch())
        return out_BTD

    return run


class Memory:
    """The memory of tensors that autograd keeps: on the device, in host memory, or both."""

    def __init__(self, layer: LayerActivations, storage: torch.UntypedStorage) -> None:
        self.layer = layer
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A tensor that autograd keeps, as a view of its memory."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any = None  # of a distributed tensor


class LayerActivations:
    """Activations that autograd keeps of one forward pass of a layer. They live as long as autograd keeps any."""

    def __init__(self, copies: HostCopies, *, staying: set[int]) -> None:
        self.copies, self.staying = copies, staying
        self.memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()  # by address, while it is collected
        self.event: torch.Event | None = None  # of the newest copies

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Packed | Tensor:
        """Take note of a tensor that autograd keeps."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        local = local_part(tensor)
        storage = local.untyped_storage()
        address = storage.data_ptr()
        is_small = storage.nbytes() < LEAST_BYTES or local.device != self.copies.device
        if is_small or address in self.staying:
            return tensor.detach()  # an output would hold its own graph
        memory = self.memories.get(address)
        if memory is None:
            self.memories[address] = memory = Memory(self, storage)
        return Packed(
            memory=memory,
            dtype=local.dtype,
            size=local.size(),
            stride=local.stride(),
            offset=int(local.storage_offset()),
            spec=tensor._spec if is_distributed(tensor) else None,
        )

    @torch.no_grad()
    def unpack(self, packed: Packed | Tensor) -> Tensor:
        """Return a tensor that autograd kept, on the device."""
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        self._wait()
        assert packed.memory.here is not None
        storage = packed.memory.here.untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        local = empty.set_(storage, packed.offset, packed.size, packed.stride)
        if packed.spec is None:
            return local
        from torch.distributed.tensor import DTensor

        return DTensor(local, packed.spec, requires_grad=False)

    def store(self) -> None:
        """Begin to copy all that is kept to host memory."""
        hosts, heres = [], []
        for memory in list(self.memories.values()):
            assert memory.here is not None
            memory.host = self.copies.empty(memory.here.numel())
            hosts.append(memory.host)
            heres.append(memory.here)
        self.event = self.copies.store(hosts, heres)

    def leave(self) -> None:
        """Free the device's memory once it is copied."""
        self._wait()
        for memory in self.memories.values():
            memory.here = None

    def fetch(self) -> None:
        """Begin to copy what is in host memory alone back to the device."""
        away = [memory for memory in self.memories.values() if memory.here is None]
        if away:
            copies, self.event = self.copies.fetch([memory.host for memory in away if memory.host is not None])
            for memory, copy in zip(away, copies, strict=True):
                memory.here = copy

    def _wait(self) -> None:
        self.copies.wait(self.event)
        self.event = None


def _storages(layer: nn.Module, others: Sequence[Any]) -> set[int]:
    """Addresses of a layer's parameters, gathered as they are, of its buffers, and of tensors that all layers share."""
    tensors = chain(layer.parameters(), layer.buffers(), _tensors(others))
    with torch.no_grad():
        return {local_part(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from chain.from_iterable(map(_tensors, value))
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
