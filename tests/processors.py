"""Processors as a dimension of the tests: profiles that this machine can play, and stand-ins inside a test.

A profile limits the instructions of oneDNN, of PyTorch's own loops and of MKL. The libraries read the limits once, so
a profile needs a process of its own. A stand-in replaces what the product believes of its processor, and so the
routes that it offers and refuses; what the libraries compute stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from meshwright.kernels import processor
from meshwright.kernels.processor import Multiplies

LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""The variables of a profile: of oneDNN, of PyTorch's loops, and two of MKL."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A kind of processor: the values of `LIMITS`, the flags of a chip that can play it, what the product sees."""

    limits: tuple[str, str, str, str]
    needs: tuple[str, ...]
    onednn: Multiplies

    @property
    def environment(self) -> Mapping[str, str]:
        return {name: value for name, value in zip(LIMITS, self.limits, strict=True) if value}


PROFILES: Mapping[str, Profile] = {
    "portable": Profile(  # the oldest instructions of each library, so sums in the most different order
        limits=("SSE41", "default", "", "COMPATIBLE"), needs=(), onednn=Multiplies.FP32
    ),
    "avx2": Profile(limits=("AVX2", "avx2", "AVX2", ""), needs=("avx2",), onednn=Multiplies.FP32),
    "avx512": Profile(
        limits=("AVX512_CORE", "avx512", "AVX512", ""), needs=("avx512_f", "avx512_vl"), onednn=Multiplies.AVX512
    ),
    "avx512-bf16": Profile(
        limits=("AVX512_CORE_BF16", "avx512", "AVX512", ""), needs=("avx512_bf16",), onednn=Multiplies.AVX512
    ),
    "amx": Profile(
        limits=("AVX512_CORE_AMX", "avx512", "AVX512", ""), needs=("amx_tile", "amx_bf16"), onednn=Multiplies.AMX
    ),
}  # fmt: skip
"""By name, from the fewest instructions to the most."""


def playable() -> list[str]:
    """The profiles that this machine can play. Those of x86 mean nothing to another processor."""
    chip = torch.cpu.get_capabilities()
    if not chip.get("avx") or not torch.backends.mkldnn.is_available():
        return []
    return [name for name, profile in PROFILES.items() if all(chip.get(flag) for flag in profile.needs)]


def current() -> str | None:
    """The profile of this process: the one of its variables, and without any the most that the chip can play."""
    here = {name: os.environ[name] for name in LIMITS if name in os.environ}
    names = [name for name, profile in PROFILES.items() if profile.environment == here]
    return next(iter(names if here else reversed(playable())), None)


def pretend(monkeypatch: pytest.MonkeyPatch, onednn: Multiplies, **facts: Any) -> None:
    """Take this processor for one whose oneDNN multiplies with these instructions, with other `facts` of it."""
    monkeypatch.setattr(processor, "HERE", replace(processor.HERE, onednn=onednn, **facts))


def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this processor for one that is like it, without AMX: attention takes its own blocks there."""
    pretend(monkeypatch, min(processor.HERE.onednn, Multiplies.AVX512))
