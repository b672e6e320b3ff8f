"""Switches of the software that the notes of a published row state.

A note that names none leaves the switch to the recipe that the row was measured with (`accuracy.recipes`), else to the
stack's release (`catalog.stacks`). Presets that a source lists with a row (`repo preset: cuda_graph=...`) without a
known recipe state all of their switches: what such a preset leaves out is off.
"""

from __future__ import annotations

import re
from typing import TypeVar

from meshwright.accuracy.csvfile import CsvRow
from meshwright.specs.features import (
    FORCED_BALANCE,
    NATURAL_ROUTING,
    AttentionKernel,
    CudaGraphs,
    Dispatcher,
    Features,
    WireFormat,
)

T = TypeVar("T")

_GRAPHS = (
    (r"cuda_graph=full_iteration|full[- ]iteration cuda graph|cg_scope=\[?'?full_iteration", CudaGraphs.FULL),
    (r"cuda_graph=(?!none)\w+, cg_scope=\['mamba'\]", CudaGraphs.STATE_SPACE),
    (r"cuda_graph=none|(?:no|without) cuda graphs?", CudaGraphs.NONE),
    (r"cuda_graph=\w+|cuda graphs?\b", CudaGraphs.PARTIAL),
)
_DISPATCHERS = (
    (r"hybrid-?ep", Dispatcher.HYBRIDEP),
    (r"deep-?ep", Dispatcher.DEEPEP),
    (r"a2a dispatcher|all-?to-?all dispatcher|moe_token_dispatcher_type=alltoall", Dispatcher.ALL_TO_ALL),
)
_ATTENTION = (
    (r"without flash|kernel=(?:torch|fused)\b", AttentionKernel.UNFUSED),
    (r"flash_attentionv?1|flash ?attention ?1\b|\bfa1\b", AttentionKernel.FA1),
    (r"flash ?attention ?-?3\b|flash_attention_?3|\bfa3\b", AttentionKernel.FA3),
    (r"flash_attention_?v?2|flash ?attention ?-?2\b|\bfa2\b|torchsdpa", AttentionKernel.FA2),
    (r"flexattn|flex_?attention", AttentionKernel.FLEX),
    (r"\baiter\b", AttentionKernel.AITER),
    (r"cudnn", AttentionKernel.CUDNN),
)
_ATTENTION_OF_VERSIONS = ((r"^pax\b.* (?:xla|2024-03 te)$", AttentionKernel.UNFUSED),)
"""Attention that framework and version name: Pax without Transformer Engine computes whole scores. Its table of March
2024 was printed in October 2023, before fused attention (NVIDIA/JAX-Toolbox at 3ae2d13c, pax/README.md)."""
_COMPILES = (
    (r"torch\.?compile|\bcompiled?\b(?! without)", True),
    (r"\bte\b[^;]*\bkernels\b", True),  # Transformer Engine's fuse as much
    (r"^fsdp;|\beager\b|cumulative: (?:baseline|\+packed)", False),
)
_OVERLAPS_TENSOR = (
    (r"no tp[- ]comm[- ]overlap|vanilla tp|^2d;|tp_comm_overlap=false", False),
    (r"async ?-?tp|tp[-_ ]comm[-_ ]overlap|user ?buffers", True),
)
_FP8_ATTENTION = (
    (r"fp8_dot_product_attention=false|bf16 attention", False),
    (r"fp8[-_ ](?:flash[-_ ]?)?(?:attention|attn|dpa|mha|dot_product)|attention in fp8", True),
)
_GRADIENT_FORMAT = (
    (r"grad(?:ient)?s?[-_ ]?(?:all-?)?(?:reduced?|reduce-?scatter)?[-_ ](?:in|to)[-_ ](bf16|fp32|fp8)", None),
    (r"(bf16|fp32|fp8) grad(?:ient)?s?[-_ ](?:all-?)?(?:reduce|reduction)", None),
)
_PARAMETER_FORMAT = ((r"(bf16|fp32|fp8)[-_ ](?:param\w*[-_ ])?(?:all-?)?gather", None),)
_IMBALANCE = (
    (
        r"load-balance mode[^:]*: (?:even|uniform)|forced?[-_ ](?:uniform|balanc)|fake balanced"
        r"|force[-_ ]load[-_ ]balanc",
        FORCED_BALANCE,
    ),
    (r"natural rout", NATURAL_ROUTING),
)
"""Patterns of notes in lower case and what they state; the first match decides. None: what the group captures."""

_MIXTURES = ("moe", "hybrid-moe")
_OFFLOADED_LAYERS = re.compile(r"cpu_offload_layers=(\d+)")


def read_features(row: CsvRow, recipe: Features | None = None) -> Features:
    """The switches that the notes of `row` state, and those of its recipe where they state none."""
    notes = row.text("notes").lower()
    software = f"{row.text('framework')} {row.text('framework_version')}".lower()
    preset = "repo preset:" in notes and recipe is None
    graphs, dispatcher = _first(_GRAPHS, notes), _first(_DISPATCHERS, notes)
    if preset and row.text("arch") in _MIXTURES:
        dispatcher = dispatcher or Dispatcher.ALL_TO_ALL
    stated = Features(
        cuda_graphs=graphs or (CudaGraphs.NONE if preset else None),
        dispatcher=dispatcher,
        overlaps_experts=True
        if re.search(
            r"a2a[_ ]overlap(?!=false)|mega-?moe", notes
        )  # MegaMoE: all-to-alls inside the grouped GEMMs
        else (False if preset else None),
        drops_tokens=_drops(notes),
        attention=_first(_ATTENTION, notes) or _first(_ATTENTION_OF_VERSIONS, software),
        fp8_attention=_first(_FP8_ATTENTION, notes),
        compiles=_first(_COMPILES, notes),
        overlaps_tensor=_first(_OVERLAPS_TENSOR, notes),
        gradient_format=_wire(_GRADIENT_FORMAT, notes),
        parameter_format=_wire(_PARAMETER_FORMAT, notes),
        offloaded_activations=_offloaded(row, notes),
        expert_imbalance=_first(_IMBALANCE, notes) if row.text("arch") in _MIXTURES else None,
    )
    return stated if recipe is None else stated.or_else(recipe)


def _wire(table: tuple[tuple[str, None], ...], notes: str) -> WireFormat | None:
    found = next((match for pattern, _ in table if (match := re.search(pattern, notes))), None)
    return WireFormat(found[1]) if found else None


def _offloaded(row: CsvRow, notes: str) -> float | None:
    """Share of the layers whose activations are offloaded; None where no note counts them."""
    stated, num_layers = _OFFLOADED_LAYERS.search(notes), row.count("layers")
    if stated is None or num_layers is None:
        return None
    return min(int(stated[1]) * (row.count("pp") or 1) / num_layers, 1.0)


def _drops(notes: str) -> bool | None:
    if "dropless" in notes:
        return False
    return True if re.search(r"token-?drop|capacity factor|token-capacity", notes) else None


def _first(table: tuple[tuple[str, T], ...], notes: str) -> T | None:
    return next((value for pattern, value in table if re.search(pattern, notes)), None)
