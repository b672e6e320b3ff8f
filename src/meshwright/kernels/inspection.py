"""Facts about compiled Triton kernels, for each architecture, on a machine without a GPU.

Triton's compilers for NVIDIA and AMD come with its wheel. This module reads from their output

    registers          of a thread, and of AMD's accumulation registers too
    spilled bytes      of a thread in local memory (NVIDIA) or scratch (AMD)
    shared bytes       of a block (LDS on AMD)
    occupancy          share of the warps of a multiprocessor (`architectures`)
    matrix instructions   WGMMA, tcgen05 or MFMA in the assembly

and adds the bytes moved over the least possible (`sources.Traffic`).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.kernels.architectures import DATA, Architecture, architectures
from meshwright.kernels.operations import OPERATIONS
from meshwright.kernels.sources import KernelSource, Tile
from meshwright.programs import install_command

MOST_TRAFFIC = 1.1
"""Most bytes that a memory-bound kernel may move over the least possible."""


@dataclass(frozen=True, kw_only=True)
class InspectedKernel:
    """A kernel with one tile choice on one architecture."""

    op: str
    kernel: str
    tile: str
    architecture: str
    registers: int
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a block
    occupancy: float
    matrix_instructions: int
    moved_bytes: int
    least_bytes: int
    is_memory_bound: bool

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults: a spill without a stated reason, more traffic than needed, GEMMs without matrix instructions."""
        where = f"{self.kernel} [{self.tile}] on {self.architecture}"
        found = []
        if self.spilled_bytes > _allowed_spills().get((self.kernel, self.tile, self.architecture), 0):
            found.append(f"{where} spills {self.spilled_bytes} bytes a thread")
        if self.is_memory_bound and self.moved_bytes > MOST_TRAFFIC * self.least_bytes:
            found.append(f"{where} moves {self.moved_bytes / self.least_bytes:.2f} times the least bytes")
        if not self.is_memory_bound and not self.matrix_instructions:
            found.append(f"{where} has no matrix instruction ({architectures()[self.architecture].matrix_instruction})")
        return tuple(found)


@cache
def _allowed_spills() -> Mapping[tuple[str, str, str], int]:
    rows = tomllib.loads((DATA / "spills.toml").read_text(encoding="utf-8")).get("spill", [])
    assert all(row["reason"] for row in rows)
    installed = version("triton")
    return {
        (row["kernel"], row["tile"], row["architecture"]): row["bytes"]
        for row in rows
        if installed.startswith(row.get("triton", ""))
    }


def inspected(ops: Sequence[str] = (), names: Sequence[str] = ()) -> list[InspectedKernel]:
    """All kernels of `ops` on the architectures `names`; empty: all of them."""
    return list(inspect(kernel_sources(ops), names=names))


def kernel_sources(ops: Sequence[str] = ()) -> tuple[KernelSource, ...]:
    """Return the Triton kernels of operations `ops`; empty: of all operations. Some share a module of kernels."""
    require_triton()
    modules = dict.fromkeys(OPERATIONS[op].kernels for op in (ops or OPERATIONS))
    return tuple(source for module in modules if module is not None for source in import_module(module).SOURCES)


def require_triton() -> None:
    """Raise MissingDependencyError where Triton or PyTorch is absent."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"Triton kernels need {package}", hint=install_command("kernels"))


def inspect(sources: Iterable[KernelSource], *, names: Sequence[str] = ()) -> Iterator[InspectedKernel]:
    """Compile each of `sources` with each tile for each architecture of `names`; empty: for all."""
    chosen = [architectures()[name] for name in (names or architectures())]
    for source in sources:
        for tile in source.tiles:
            for architecture in chosen:
                if not tile.architectures or architecture.name in tile.architectures:
                    yield inspect_one(source, tile=tile, architecture=architecture)


def inspect_one(source: KernelSource, *, tile: Tile, architecture: Architecture) -> InspectedKernel:
    """Compile one kernel and read the compiler's output."""
    compiled = compile_kernel(source, tile=tile, architecture=architecture)
    registers, spilled = (
        _of_cubin(compiled.asm["cubin"]) if architecture.backend == "cuda" else _of_amdgcn(compiled.asm["amdgcn"])
    )
    shared = int(compiled.metadata.shared)
    assembly = compiled.asm["ptx" if architecture.backend == "cuda" else "amdgcn"]
    occupancy = architecture.occupancy(registers_per_thread=registers, shared_bytes=shared, num_warps=tile.num_warps)
    traffic = source.traffic(source.sizes, tile)
    num_programs = architecture.multiprocessors * round(occupancy * architecture.warps / tile.num_warps)
    return InspectedKernel(
        op=source.op,
        kernel=source.name,
        tile=tile.label,
        architecture=architecture.name,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        occupancy=occupancy,
        matrix_instructions=len(re.findall(rf"^\s*(?:@\S+\s+)?{architecture.matrix_instruction}", assembly, re.M)),
        moved_bytes=traffic.moved_with(cache_bytes=architecture.cache_bytes, num_programs=num_programs),
        least_bytes=traffic.least_bytes,
        is_memory_bound=source.is_memory_bound,
    )


def compile_kernel(source: KernelSource, *, tile: Tile, architecture: Architecture) -> Any:
    """Triton's compiled kernel. Raises InputError in Triton's interpreter, which compiles nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = source.function
    if not isinstance(function, triton.JITFunction):
        raise InputError("kernels cannot be compiled under TRITON_INTERPRET=1", hint="unset TRITON_INTERPRET")
    constants = {**source.constants, **tile.constants}
    types, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        kind, _, divisor = source.signature.get(name, "constexpr").partition(":")
        if kind == "1":
            constants[name] = 1
        types[name] = "constexpr" if name in constants else kind
        if name not in constants and (kind.startswith("*") or divisor):
            attributes[(index,)] = [["tt.divisibility", 16]]
    missing = [name for name, kind in types.items() if kind == "constexpr" and name not in constants]
    assert not missing, f"{source.name}: neither a type nor a constant for {missing}"
    target = GPUTarget(architecture.backend, architecture.target, architecture.warp_size)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return triton.compile(
        ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes), target=target, options=options
    )


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, from cuobjdump."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(knobs.nvidia.cuobjdump.path)), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _of_amdgcn(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, accumulation registers included, and its bytes of scratch."""
    registers = re.search(r"^\s*\.vgpr_count:\s+(\d+)", assembly, re.M)
    scratch = re.search(r"^\s*\.private_segment_fixed_size:\s+(\d+)", assembly, re.M)
    if registers is None or scratch is None:
        raise RuntimeError("the assembly has no metadata of registers")
    return int(registers[1]), int(scratch[1])
