"""Kinds of processors by the limits that make a newer one compute like them. Imports no PyTorch.

A profile limits the instructions of oneDNN, of PyTorch's own loops and of MKL. The libraries read the limits once, so
a profile needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""The variables of a profile: of oneDNN, of PyTorch's loops, and two of MKL."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A kind of processor: values of `LIMITS`, and the flags that a processor needs to play it, without underscores."""

    limits: tuple[str, str, str, str]
    needs: tuple[str, ...]
    onednn: str
    """Name of the member of `meshwright.kernels.processor.Multiplies`."""

    @property
    def environment(self) -> Mapping[str, str]:
        return {name: value for name, value in zip(LIMITS, self.limits, strict=True) if value}


PROFILES: Mapping[str, Profile] = {
    "portable": Profile(  # the oldest instructions of each library, so sums in the most different order
        limits=("SSE41", "default", "", "COMPATIBLE"), needs=(), onednn="FP32"
    ),
    "avx2": Profile(limits=("AVX2", "avx2", "AVX2", ""), needs=("avx2",), onednn="FP32"),
    "avx512": Profile(
        limits=("AVX512_CORE", "avx512", "AVX512", ""), needs=("avx512f", "avx512vl"), onednn="AVX512"
    ),
    "avx512-bf16": Profile(
        limits=("AVX512_CORE_BF16", "avx512", "AVX512", ""), needs=("avx512bf16",), onednn="AVX512"
    ),
    "amx": Profile(
        limits=("AVX512_CORE_AMX", "avx512", "AVX512", ""), needs=("amxtile", "amxbf16"), onednn="AMX"
    ),
}  # fmt: skip
"""By name, from the fewest instructions to the most."""


def playable_with(flags: Collection[str]) -> list[str]:
    """Return the profiles that a processor with these flags can play; spellings differ in underscores."""
    bare = {flag.replace("_", "") for flag in flags}
    return [name for name, profile in PROFILES.items() if bare.issuperset(profile.needs)]
