"""A Triton kernel as `inspection` compiles it: argument types, tile choices, and the bytes it moves. Imports no Triton.

Traffic counts each read of an input and each write of an output in device memory. The least traffic reads
every input once and writes every output once, over the whole operation and not over each of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Sizes = Mapping[str, int]
"""Sizes of a problem, such as {"rows": 8192, "columns": 14336}."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One choice of compile-time constants. It is for `architectures`; empty: for all."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    architectures: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The choice in one line."""
        values = [f"{name}={value}" for name, value in self.constants.items()]
        return ", ".join([*values, f"{self.num_warps} warps", f"{self.num_stages} stages"])


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of device memory that a launch moves, and the least that its operation could move.

    `reread_bytes` are read a second time by the program that read them, from the cache where the `working_bytes` of all
    programs that run at a time fit into it, else from memory.
    """

    moved_bytes: int
    least_bytes: int
    reread_bytes: int = 0
    working_bytes: int = 0  # of a program

    def moved_with(self, *, cache_bytes: int, num_programs: int) -> int:
        """Bytes moved where `num_programs` run at a time and share a cache of `cache_bytes`."""
        is_cached = self.working_bytes * num_programs <= cache_bytes
        return self.moved_bytes + (0 if is_cached else self.reread_bytes)


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """A Triton kernel of operation `op`.

    `function` is the result of `triton.jit`. `signature` has a type for each argument that is no compile-time
    constant: "*bf16" (a pointer, aligned to 16 bytes), "i32", "i32:16" (a multiple of 16), "fp32", or "1" (an
    integer that is one, such as the stride of a contiguous dimension, and thereby a constant). All tiles
    share `constants`. `traffic` takes `sizes` or other sizes, and the tile.
    """

    name: str
    op: str
    function: Any
    signature: Mapping[str, str]
    tiles: tuple[Tile, ...]
    traffic: Callable[[Sizes, Tile], Traffic]
    sizes: Sizes
    constants: Mapping[str, Any] = field(default_factory=dict)
    is_memory_bound: bool = True
