"""Instructions that oneDNN multiplies with on this processor, under the limits of the environment.

`torch.cpu.get_capabilities` states the chip's instructions. `ONEDNN_MAX_CPU_ISA`, which oneDNN reads once in
a process, limits oneDNN to some of them. `ATEN_CPU_CAPABILITY` limits PyTorch's own loops, and no choice of a
route depends on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum

import torch


class Multiplies(IntEnum):
    """The instructions of oneDNN's GEMMs. Each level includes the levels before it."""

    NOTHING = 0  # PyTorch was built without oneDNN
    FP32 = 1  # AVX2
    BF16 = 2  # no AVX-512, and bf16: Arm
    AVX512 = 3
    AMX = 4


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor. Whatever differs between processors is derived here, so that a stand-in of a test is complete."""

    onednn: Multiplies
    has_mkl: bool
    is_intel: bool

    @property
    def has_onednn(self) -> bool:
        return self.onednn > Multiplies.NOTHING

    @property
    def widens_bf16(self) -> bool:
        """True where oneDNN has no GEMM of bf16."""
        return self.onednn == Multiplies.FP32

    @property
    def has_amx(self) -> bool:
        return self.onednn == Multiplies.AMX

    @property
    def is_better_with_onednn(self) -> bool:
        """True where oneDNN multiplies fp32 faster than MKL, which leaves AVX-512 unused on other makers' chips."""
        return self.onednn >= Multiplies.AVX512 and self.has_mkl and not self.is_intel


def _onednn() -> Multiplies:
    chip = torch.cpu.get_capabilities()
    if not torch.backends.mkldnn.is_available():
        return Multiplies.NOTHING
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # asks oneDNN, which knows its limit
        return Multiplies.FP32
    if not chip.get("avx512_f"):
        return Multiplies.BF16
    return Multiplies.AMX if chip.get("amx_tile") and _allows_amx() else Multiplies.AVX512


def _allows_amx() -> bool:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return "AMX" in limit or not limit.startswith(("AVX", "SSE"))


HERE = Processor(
    onednn=_onednn(),
    has_mkl=torch.backends.mkl.is_available(),
    is_intel="Intel" in str(torch.cpu.get_capabilities().get("cpu_name")),
)
"""The processor of this process."""
