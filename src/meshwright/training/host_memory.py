"""Tensors in host memory, and copies between it and the device that run beside the device's kernels.

On a GPU host tensors are pinned: the device then reads and writes them itself, while the processor continues. Either
direction has a stream of its own, as the host link carries both at once. A stream waits for what the computing stream
was given before the copy, and the computing stream for a copy where `wait` says so; nothing waits on the processor.
So device memory needs no `record_stream`: what a copy reads or writes may be freed after its `wait`.

On a CPU the "device" is host memory, too: copies are plain ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""


def host_zeros(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `size` zeros in host memory, pinned if `device` is a GPU.

    PyTorch's own pinned memory has sizes that are powers of two, up to twice what is asked. Raises RuntimeError where
    the driver cannot pin as much.
    """
    zeros = torch.zeros(size, dtype=dtype)
    if device.type == "cuda" and size:
        runtime: Any = torch.cuda.cudart()
        address = zeros.data_ptr()
        error = int(runtime.cudaHostRegister(address, zeros.nbytes, PORTABLE))
        if error:
            raise RuntimeError(f"{zeros.nbytes} bytes of host memory cannot be pinned: error {error} of the driver")
        weakref.finalize(zeros.untyped_storage(), runtime.cudaHostUnregister, address)
    return zeros


class HostCopies:
    """Copies between host memory and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else (None, None)
        self.incoming, self.outgoing = streams

    def empty(self, size: int) -> Tensor:
        """Return `size` bytes of host memory for a short time: PyTorch keeps pinned memory to hand it out again."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def fetch(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Return copies of `sources` on the device, which are complete after `wait` for the event."""
        copies = [torch.empty(source.shape, dtype=source.dtype, device=self.device) for source in sources]
        return copies, self._copy(copies, sources, self.incoming)

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Event | None:
        """Copy `sources` on the device to `targets` on the host. After `wait` for the event `sources` may be freed."""
        return self._copy(targets, sources, self.outgoing)

    def wait(self, event: torch.Event | None) -> None:
        """Let the computing stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)  # pyright: ignore[reportArgumentType]

    def settle(self) -> None:
        """Return when the host tensors have what was stored, so that the processor may read and write them."""
        if self.outgoing is not None:
            self.outgoing.synchronize()

    def _copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.cuda.Stream | None
    ) -> torch.Event | None:
        if stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return stream.record_event()
