"""Architectures that kernels are compiled for, their default routes, and how many warps fit on one multiprocessor.

    occupancy = warps that fit / warps that the multiprocessor holds
    warps that fit = min(registers / registers of a warp, blocks by shared memory x warps of a block, limit)

Imports no PyTorch but in `architecture_of`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.kernels.operations import TRITON

if TYPE_CHECKING:
    import torch

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Limits of one multiprocessor (NVIDIA) or compute unit (AMD); sources are in `data/architectures.toml`."""

    name: str
    devices: str
    generation: str  # as the catalogue's accelerators name it (`Accelerator.architecture`)
    backend: str
    target: int | str
    warp_size: int
    shared_bytes: int
    shared_bytes_per_block: int
    reserved_shared_bytes: int
    registers: int
    register_unit: int
    registers_per_thread: int
    warps: int
    blocks: int
    multiprocessors: int  # of the smallest of these devices
    cache_bytes: int  # last level before device memory
    matrix_instruction: str

    def occupancy(self, *, registers_per_thread: int, shared_bytes: int, num_warps: int) -> float:
        """Share of the warps of a multiprocessor that a kernel of blocks of `num_warps` can fill, 0 to 1."""
        needed = registers_per_thread * self.warp_size
        per_warp = max(self.register_unit, -(-needed // self.register_unit) * self.register_unit)
        blocks = min(self.blocks, self.registers // per_warp // num_warps, self.warps // num_warps)
        taken = shared_bytes + self.reserved_shared_bytes
        if taken:
            blocks = min(blocks, self.shared_bytes // taken)
        return blocks * num_warps / self.warps


@cache
def architectures() -> Mapping[str, Architecture]:
    """Every architecture by name."""
    text = (DATA / "architectures.toml").read_text(encoding="utf-8")
    return {name: Architecture(name=name, **values) for name, values in tomllib.loads(text).items()}


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((DATA / "defaults.toml").read_text(encoding="utf-8"))


def _table(architecture: str) -> Mapping[str, Any]:
    return _defaults().get(architecture) or _defaults()["other"]


def is_measured(op: str, *, architecture: str) -> bool:
    """Return True if a device of `architecture` measured the order of the routes of `op`."""
    table = _table(architecture)
    return table["basis"] == "measured" or op in table.get("measured", ())


def expected_routes(op: str, *, architecture: str) -> tuple[str, ...]:
    """Routes of `op`, the fastest first, as measured or as the bytes that they move predict; the reference last."""
    listed = tuple(_table(architecture).get(op, ()))
    return listed if "reference" in listed else (*listed, "reference")


def default_routes(op: str, *, architecture: str) -> tuple[str, ...]:
    """Routes of `op` by preference. Until a device has measured, the routes of libraries and of PyTorch."""
    listed = expected_routes(op, architecture=architecture)
    return listed if is_measured(op, architecture=architecture) else tuple(r for r in listed if r != TRITON)


def compiled_operations(architecture: str) -> tuple[str, ...]:
    """Operations whose reference, compiled, was measured to be faster than every route: compiled graphs take it."""
    return tuple(_table(architecture).get("compiled", ()))


def architecture_of(device: torch.device) -> str:
    """The name of a device's architecture, such as sm90 or gfx942; "cpu" for a CPU; maybe none of `architectures`."""
    if device.type == "cpu":
        return "cpu"
    return _accelerator(device.type, device.index)


@cache
def _accelerator(kind: str, index: int | None) -> str:
    import torch

    if kind != "cuda":
        return kind
    properties: Any = torch.cuda.get_device_properties(0 if index is None else index)
    if torch.version.hip is not None:
        return properties.gcnArchName.partition(":")[0]
    return f"sm{properties.major}{properties.minor}"
