"""Switches of the software that the notes of a published row state; words beside its framework are in them, too.

A note that names none leaves the switch to the recipe that the row was measured with (`accuracy.recipes`), else to the
stack's release (`catalog.stacks`). Presets that a source lists with a row (`repo preset: cuda_graph=...`) without a
known recipe state all of their switches: what such a preset leaves out is off.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.statements import read_statements
from meshwright.catalog.stacks import features_from, features_of, stack_facts
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Features

T = TypeVar("T")

_ATTENTION_OF_VERSIONS = ((r"^pax\b.* (?:xla|2024-03 te)$", AttentionKernel.UNFUSED),)
"""Attention that framework and version name: Pax without Transformer Engine computes whole scores. Its table of March
2024 was printed in October 2023, before fused attention (NVIDIA/JAX-Toolbox at 3ae2d13c, pax/README.md)."""
_LADDER = {"fsdp": {"compiles": False}, "2d": {"overlaps_tensor": False}}
"""Rungs of torchtitan's tables, whose first words list everything that a row adds to the one before."""
_SWITCHES = (
    "cuda_graphs", "dispatcher", "overlaps_experts", "drops_tokens", "capacity_factor", "attention", "fp8_attention",
    "compiles", "overlaps_tensor", "gradient_format", "parameter_format", "expert_imbalance",
)  # fmt: skip
"""Switches of `Features` that the vocabulary of notes has."""

_MIXTURES = ("moe", "hybrid-moe")
_OFFLOADED_LAYERS = re.compile(r"cpu[-_ ]offload(?:ing)?(?:[-_ ]num)?[-_ ]layers[= ](\d+)")
_KEPT_TENSORS = re.compile(r"\b\w+=(device|offload)\b")
"""Place in which MaxText's remat_policy=custom keeps each tensor that it names."""
_OFFLOADED_SHARE = re.compile(
    r"activation[-_ ]offload(?:ing)?[-_ ](?:ratio|share|fraction)[=: ]*(0?\.\d+|[01](?:\.0*)?)(?![\d.])"
)


def read_features(row: CsvRow, recipe: Features | None = None) -> Features:
    """Switches from the notes of `row`; its recipe gives the switches that they do not state."""
    said = read_statements(row.text("notes"))
    software = f"{row.text('framework')} {row.text('framework_version')}".lower()
    preset = "repo preset:" in row.text("notes") and recipe is None
    switches = {name: said.value(name) for name in _SWITCHES}
    if switches["fp8_attention"] is None:
        switches["fp8_attention"] = read_statements(row.text("precision")).value("fp8_attention")
    if preset:
        switches |= {"cuda_graphs": switches["cuda_graphs"] or CudaGraphs.NONE}
        switches |= {"overlaps_experts": bool(switches["overlaps_experts"])}
    if row.text("arch") not in _MIXTURES:
        switches["expert_imbalance"] = None
    elif preset:
        switches["dispatcher"] = switches["dispatcher"] or Dispatcher.ALL_TO_ALL
    if switches["attention"] is None:
        switches["attention"] = _first(_ATTENTION_OF_VERSIONS, software)
    if "torchtitan" in software and said.clauses:
        switches |= {k: v for k, v in _LADDER.get(said.clauses[0].text, {}).items() if switches[k] is None}
    stated = features_from({name: value for name, value in switches.items() if value is not None})
    mentions = f"{row.text('recompute')}; {row.text('notes')}".lower()
    stated = replace(stated, offloaded_activations=_offloaded(row, mentions))
    return stated if recipe is None else stated.or_else(recipe)


def note_of_defaults(c: RunConditions, release: str) -> str:
    """The switches of `c` that its row leaves to the framework's `release`, and that could change its prediction."""
    used = features_of(c.stack, c.accelerator, precision=c.precision)
    format_ = used.gradient_format and c.plan.data > 1
    said = {
        "compiles": stack_facts(c.stack.framework).eager and ("torch.compile" if used.compiles else "no torch.compile"),
        "attention": f"attention {used.attention}",
        "cuda_graphs": c.accelerator.vendor == "NVIDIA" and f"CUDA graphs: {used.cuda_graphs}",
        "overlaps_tensor": c.plan.tensor > 1 and f"tensor overlap {'on' if used.overlaps_tensor else 'off'}",
        "dispatcher": c.plan.expert > 1 and f"dispatcher {used.dispatcher}",
        "gradient_format": format_ and f"gradients reduced in {used.gradient_format}",
    }
    assumed = [text for name, text in said.items() if text and getattr(c.stack.features, name) is None]
    return f"assumed as {release} sets it: {', '.join(assumed)}" if assumed else ""


def _offloaded(row: CsvRow, mentions: str) -> float | None:
    """Share of the saved activations, tensors or layers that is offloaded; None where the row tells none."""
    if share := _OFFLOADED_SHARE.search(mentions):
        return float(share[1])
    if kept := _KEPT_TENSORS.findall(mentions):
        return 1.0 if set(kept) == {"offload"} else None
    stated, num_layers = _OFFLOADED_LAYERS.search(mentions), row.count("layers")
    if stated is None or num_layers is None:
        return None
    return min(int(stated[1]) * (row.count("pp") or 1) / num_layers, 1.0)


def _first(table: tuple[tuple[str, T], ...], notes: str) -> T | None:
    return next((value for pattern, value in table if re.search(pattern, notes)), None)
