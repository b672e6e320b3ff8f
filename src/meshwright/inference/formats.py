"""Storage formats of weights and of the KV cache: bytes per value, with the scales that block formats carry.

    mxfp4   4 bits and an 8-bit scale for 32 values      17/32 = 0.53125 bytes
    nvfp4   4 bits and an 8-bit scale for 16 values       9/16 = 0.5625 bytes
    mxfp8   8 bits and an 8-bit scale for 32 values      33/32 = 1.03125 bytes

Sources: OCP Microscaling Formats (MX) specification 1.0, section 5; NVIDIA, "Introducing NVFP4" (2025-06): e2m1 values,
e4m3 scale for 16 values. fp8 has one scale per tensor or channel, which is below 0.1 % and not counted. fp8-ffn: Meta's
own checkpoint of Llama 3.1 405B has 8 bits in feed-forward blocks only (arXiv 2407.21783, section 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Accelerator

FP4 = "fp4"
"""Four bits in the block format of the accelerator's vendor: mxfp4 on AMD, nvfp4 on others."""


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """Number format of stored values. `matmul` is its key in `Accelerator.peak_flops_per_s`."""

    name: str
    bytes_per_value: float
    matmul: str
    ffn_only: bool = False  # matrices of attention stay in 16 bits

    @property
    def is_quantised(self) -> bool:
        """Return True if embeddings, norms and routers stay in 16 bits while the matrices of layers do not."""
        return self.bytes_per_value < KEPT_BYTES


KEPT_BYTES = 2.0
"""Bytes of a parameter that quantised checkpoints keep in 16 bits: embeddings, output head, norms, biases, router."""


def _table(*formats: StorageFormat) -> Mapping[str, StorageFormat]:
    return MappingProxyType({found.name: found for found in formats})


WEIGHT_FORMATS = _table(
    StorageFormat(name="fp32", bytes_per_value=4.0, matmul="fp32"),
    StorageFormat(name="bf16", bytes_per_value=2.0, matmul="bf16"),
    StorageFormat(name="fp16", bytes_per_value=2.0, matmul="bf16"),
    StorageFormat(name="fp8", bytes_per_value=1.0, matmul="fp8"),
    StorageFormat(name="fp8-ffn", bytes_per_value=1.0, matmul="fp8", ffn_only=True),
    StorageFormat(name="mxfp8", bytes_per_value=33 / 32, matmul="fp8"),
    StorageFormat(name="nvfp4", bytes_per_value=9 / 16, matmul="fp4"),
    StorageFormat(name="mxfp4", bytes_per_value=17 / 32, matmul="fp4"),
)

CACHE_FORMATS = _table(
    StorageFormat(name="fp32", bytes_per_value=4.0, matmul="fp32"),
    StorageFormat(name="bf16", bytes_per_value=2.0, matmul="bf16"),
    StorageFormat(name="fp16", bytes_per_value=2.0, matmul="bf16"),
    StorageFormat(name="fp8", bytes_per_value=1.0, matmul="bf16"),
    StorageFormat(name="nvfp4", bytes_per_value=9 / 16, matmul="bf16"),
    StorageFormat(name="mxfp4", bytes_per_value=17 / 32, matmul="bf16"),
)


def weight_format(name: str, accelerator: Accelerator) -> StorageFormat:
    """The weight format `name`; `fp4` is the block format of the accelerator's vendor. Raises UnknownNameError."""
    return _named("precision", name, WEIGHT_FORMATS, accelerator)


def cache_format(name: str, accelerator: Accelerator) -> StorageFormat:
    """The KV cache format `name`. Raises UnknownNameError."""
    return _named("KV precision", name, CACHE_FORMATS, accelerator)


def usual_cache(weights: StorageFormat) -> str:
    """The cache's format where none is given: fp8 with weights of 8 bits or fewer, as published checkpoints have it.

    >>> usual_cache(WEIGHT_FORMATS["mxfp4"]), usual_cache(WEIGHT_FORMATS["bf16"])
    ('fp8', 'bf16')
    """
    return "fp8" if weights.is_quantised else "bf16"


def _named(kind: str, name: str, formats: Mapping[str, StorageFormat], accelerator: Accelerator) -> StorageFormat:
    wanted = name.strip().lower()
    if wanted == FP4:
        wanted = "mxfp4" if accelerator.vendor == "AMD" else "nvfp4"
    if wanted not in formats:
        raise UnknownNameError(kind, name, known=[*formats, FP4])
    return formats[wanted]


def computed_in(found: StorageFormat, accelerator: Accelerator) -> str:
    """Format of the GEMMs: that of the weights, or the nearest wider one that the accelerator multiplies.

    Weights in a format without units are widened on the fly (weight-only quantisation): to 16 bits.
    """
    peaks = accelerator.peak_flops_per_s
    if found.matmul in peaks:
        return found.matmul
    return "bf16" if "bf16" in peaks else max(peaks, key=lambda name: peaks[name])
