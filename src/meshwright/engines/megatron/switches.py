"""Switches of software (`stack` of the run file) as settings of Megatron, and back.

`switches.toml` serves both directions: exports write the settings of a value, imports look for the value whose settings
are given. Meshwright's own processes set the format of gradients between ranks and the capacity of experts: they run
without Transformer Engine, DeepEP and CUDA graphs. The files for Megatron-LM and Megatron-Bridge set all that Megatron
has a switch for. Attention in fp8, fused experts and the version of FlashAttention have no option of Megatron-LM
core_v0.16.1: only the file for Megatron-Bridge 0.6.2 sets them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.catalog.stacks import switches_of
from meshwright.specs.features import FUSED_IN, AttentionKernel, CudaGraphs, Dispatcher, Features, WireFormat, runs_on
from meshwright.specs.hardware import Accelerator
from meshwright.specs.plan import Plan
from meshwright.specs.precision import Precision
from meshwright.specs.run import Run

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SwitchScope:
    """The experts of a model, and the ranks over which experts and tensors are split."""

    has_experts: bool
    expert: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A key of `stack`: Megatron's settings for each value. Of values with the same settings, the first one is read."""

    settings: Mapping[Any, Settings]
    applies: Callable[[SwitchScope], bool]


GRAPHS_OF_EXPERTS = ["moe_router", "moe_preprocess"]
"""Parts of a mixture that partial graphs hold besides attention."""

FUSED_EXPERTS_ENV = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Variable of Transformer Engine without which Megatron-Core 0.19 refuses fused experts."""

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_VALUES = {
    "cuda_graphs": CudaGraphs, "dispatcher": Dispatcher, "attention": AttentionKernel, "gradient_format": WireFormat,
    "parameter_format": WireFormat,
}  # fmt: skip
"""Kinds of the values of switches; those of others are true, false or a number."""
_APPLIES: dict[str, Callable[[SwitchScope], bool]] = {
    **dict.fromkeys(("dispatcher", "fuses_experts", "expert_imbalance"), lambda scope: scope.has_experts),
    "overlaps_experts": lambda scope: scope.expert > 1,
    "overlaps_tensor": lambda scope: scope.tensor > 1,
}


def _switches(kind: str) -> dict[str, Switch]:
    return {
        name: Switch(
            settings={_VALUES.get(name, json.loads)(value): found for value, found in table.items()},
            applies=_APPLIES.get(name, lambda _: True),
        )
        for name, table in _TABLES[kind].items()
    }


LAYERS, FORMATS = _switches("layers"), _switches("formats")
SWITCHES = LAYERS | FORMATS
"""Switches with named values; capacities and offloaded activations are numbers, and have functions of their own."""

BRIDGE_ONLY = ("flash_attention_version", *LAYERS["fuses_experts"].settings[True])
"""Settings of layers that only Megatron-Bridge's release of Megatron-Core has."""

FLASH_ATTENTIONS = frozenset(
    value for value, found in LAYERS["attention"].settings.items() if "flash_attention_version" in found
)
"""Kernels that arguments of Megatron-LM do not tell apart."""

ABSENT: Settings = _TABLES["absent"]


def settings_of_switch(name: str, value: Any, scope: SwitchScope) -> Settings:
    """Return Megatron's settings for a value of a switch; none where it has no meaning or Megatron lacks the value."""
    switch = SWITCHES[name]
    if not switch.applies(scope) or value not in switch.settings:
        return {}
    found = switch.settings[value]
    if value is CudaGraphs.PARTIAL and scope.has_experts:
        return found | {"cuda_graph_scope": [*found["cuda_graph_scope"], *GRAPHS_OF_EXPERTS]}
    return found


def values_of_switch(name: str, given: Settings, *, scope: SwitchScope, accelerator: Accelerator) -> list[Any]:
    """Return the values of a switch on `accelerator` whose settings are `given`; a setting of None allows all."""
    return [
        value
        for value in SWITCHES[name].settings
        if (wanted := settings_of_switch(name, value, scope))
        and all(given.get(key) in (None, setting) for key, setting in wanted.items())
        and (not isinstance(value, AttentionKernel | Dispatcher) or runs_on(value, accelerator))
    ]


def switches_set(run: Run) -> Features:
    """Return the switches of `run` that are set: those of its estimate, but for three that nothing states.

    Attention: Transformer Engine chooses, and the release says what it chooses. Fused experts: they exist in one
    precision, and the estimate has them in no other. Balanced experts: forced, a router learns nothing.
    """
    known, stated = switches_of(run), run.stack.features
    fuses = stated.fuses_experts or (known.fuses_experts and run.precision.name == FUSED_IN)
    return replace(known, attention=stated.attention, fuses_experts=fuses, expert_imbalance=stated.expert_imbalance)


def _format(run: Run, name: str) -> Settings:
    return FORMATS[name].settings.get(getattr(switches_set(run), name), {})


def reduces_in_fp32(run: Run) -> bool:
    """True unless the run says that gradients are accumulated and reduced in 16 bits."""
    return _format(run, "gradient_format").get("grad_reduce_in_fp32", True)


def gathers_in_fp8(run: Run) -> bool:
    """True if the run says that parameters are gathered in 8 bits, which needs weights in 8 bits."""
    return "fp8_param_gather" in _format(run, "parameter_format") and keeps_fp8_on_the_wire(run.precision)


def keeps_fp8_on_the_wire(precision: Precision) -> bool:
    """True if weights in 8 bits are gathered so: those of MXFP8 are gathered in bf16, in the buffer of gradients."""
    return precision.matmul == "fp8" and precision.name != "mxfp8"


def capacity(run: Run) -> Settings:
    """Settings of experts with a capacity, to which all are padded; none where the run file states no capacity."""
    features = switches_set(run)
    if not features.has_capacity or run.model.experts is None:
        return {}
    return {"moe_expert_capacity_factor": features.busiest_expert_ratio, "moe_pad_expert_input_to_capacity": True}


def offloaded_layers(run: Run) -> float:
    """Layers whose saved activations are kept in host memory; a fraction where the share of the run file is none."""
    share = switches_set(run).offloaded_activations or 0.0
    layers = share * run.model.num_layers
    return round(layers) if abs(layers - round(layers)) < LAYER_TOLERANCE else layers


LAYER_TOLERANCE = 0.05
"""Of a layer: a share with two decimals need not be exact."""


def fuses_experts(run: Run) -> bool:
    """True if grouped GEMMs of experts quantise, activate and permute by themselves."""
    return bool(switches_set(run).fuses_experts) and run.model.experts is not None


def transformer_switches(run: Run, plan: Plan) -> Settings:
    """Settings of layers for programs with Transformer Engine, of the switches that are set."""
    found = {key: value for key, value in _layers(run, plan).items() if key not in BRIDGE_ONLY}
    if num_offloaded := offloaded_layers(run):
        found |= {"cpu_offloading": True, "cpu_offloading_num_layers": num_offloaded}
    return found


def bridge_switches(run: Run, plan: Plan) -> Settings:
    """Settings of layers that only Megatron-Bridge's release of Megatron-Core has."""
    return {key: value for key, value in _layers(run, plan).items() if key in BRIDGE_ONLY}


def _layers(run: Run, plan: Plan) -> Settings:
    scope = SwitchScope(has_experts=run.model.experts is not None, expert=plan.expert, tensor=plan.tensor)
    features, found = switches_set(run), dict[str, Any]()
    for name in LAYERS:
        found |= settings_of_switch(name, getattr(features, name), scope)
    return found
