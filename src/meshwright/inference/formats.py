"""Storage formats of weights and of the KV cache (`data/formats.toml`): bytes per value with the scales of blocks.

Integers of 4 and 8 bits beside activations of 16 bits (W4A16, W8A16) are widened in registers: their GEMMs have the
rate of 16 bits. One or two vector instructions a weight take at most 40 % of the time in which an H100 reads its half
byte, and 80 % on B200: they hide behind the read and are not counted. W8A8 multiplies int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from meshwright.errors import InputError, UnknownNameError
from meshwright.files import toml_table
from meshwright.specs.hardware import Accelerator

DATA = Path(__file__).parent / "data"

FP4 = "fp4"
"""Four bits in the block format of the accelerator's vendor: mxfp4 on AMD, nvfp4 on others."""


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """Number format of stored values. `matmul` is its key in `Accelerator.peak_flops_per_s`."""

    name: str
    bytes_per_value: float
    matmul: str
    matmul_by_vendor: Mapping[str, str] = field(default_factory=dict, compare=False)  # where activations are wider
    ffn_only: bool = False  # matrices of attention stay in 16 bits
    group_bits: int = 0  # of an integer whose scale and zero point are those of a group; 0: it is none
    usual_cache: str = ""  # "": fp8 where weights are quantised
    other_names: Sequence[str] = field(default=(), compare=False)
    engines: Mapping[str, Sequence[str]] | None = field(default=None, compare=False)  # architectures; None: all

    @property
    def is_quantised(self) -> bool:
        """Return True if embeddings, norms and routers stay in 16 bits while the matrices of layers do not."""
        return self.bytes_per_value < KEPT_BYTES


KEPT_BYTES = 2.0
"""Bytes of a parameter that quantised checkpoints keep in 16 bits: embeddings, output head, norms, biases, router."""


def _table(of: str) -> Mapping[str, StorageFormat]:
    rows = toml_table(DATA / "formats.toml")[of]
    return MappingProxyType({name: StorageFormat(name=name, **row) for name, row in rows.items()})


WEIGHT_FORMATS, CACHE_FORMATS = _table("weights"), _table("cache")


GROUPS = range(8, 2**16 + 1)
"""Values that may share a scale: from less than any kernel has to a whole row."""


def weight_format(name: str, accelerator: Accelerator) -> StorageFormat:
    """The weight format `name`; `fp4` is the block format of the accelerator's vendor. Raises UnknownNameError.

    >>> weight_format("awq-g32", None).bytes_per_value  # (4 + 20/32) / 8
    0.578125
    """
    base, has_size, size = name.strip().lower().partition("-g")
    found = next((f for f in WEIGHT_FORMATS.values() if base in (f.name, *f.other_names)), None)
    if found is None or (has_size and not (found.group_bits and size.isdecimal() and int(size) in GROUPS)):
        return _named("precision", name, WEIGHT_FORMATS, accelerator)
    if not has_size:
        return found
    held = (found.group_bits + (16 + found.group_bits) / int(size)) / 8
    return replace(found, name=f"{found.name}-g{size}", bytes_per_value=held)


def check_run(weights: StorageFormat, engine: str, accelerator: Accelerator) -> None:
    """Raise InputError where an engine has no kernels for weights of this format on an accelerator."""
    if weights.engines is None:
        return
    runs = weights.engines.get("vllm" if engine == "generic" else engine, ())
    others = [name for name, on in weights.engines.items() if accelerator.architecture in on]
    if accelerator.architecture not in runs or weights.matmul not in accelerator.peak_flops_per_s:
        raise InputError(
            f"{engine} is not known to multiply {weights.name} weights on {accelerator.name}", got=engine,
            allowed=f"on {accelerator.architecture}: {', '.join(others) or 'no engine'}",
            hint=f"{engine} does on {', '.join(runs) or 'no device'}",
        )  # fmt: skip


def cache_format(name: str, accelerator: Accelerator) -> StorageFormat:
    """The KV cache format `name`. Raises UnknownNameError."""
    return _named("KV precision", name, CACHE_FORMATS, accelerator)


def usual_cache(weights: StorageFormat, model: str) -> str:
    """The cache's format where none is given: fp8 with floats of 8 bits or fewer, as most checkpoints have it.

    >>> [usual_cache(WEIGHT_FORMATS[name], "llama3.1-405b") for name in ("mxfp4", "bf16", "int4")]
    ['fp8', 'bf16', 'bf16']
    >>> usual_cache(WEIGHT_FORMATS["mxfp4"], "gpt-oss-20b")
    'bf16'
    """
    narrow = toml_table(DATA / "checkpoints.toml")["caches"].get(model, "fp8")
    return weights.usual_cache or (narrow if weights.is_quantised else "bf16")


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
    matmul = found.matmul_by_vendor.get(accelerator.vendor, found.matmul)
    if matmul in peaks and found.matmul in peaks:
        return matmul
    return "bf16" if "bf16" in peaks else max(peaks, key=lambda name: peaks[name])
