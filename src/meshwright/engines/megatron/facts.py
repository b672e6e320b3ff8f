"""Facts about Megatron-Core 0.16 for the planner."""

from __future__ import annotations

from meshwright.planner.engines import AnyValue, EngineFacts, Rule, Scope
from meshwright.planner.rules import is_divisor
from meshwright.specs.features import RELEASE_DEFAULTS, CudaGraphs, Dispatcher, Features, Preset, WireFormat
from meshwright.specs.plan import AxisOrder, Recompute, Schedule, Sharding

RULES = (
    Rule(
        name="recomputed layers of stages",
        scope=Scope.CHOICE,
        holds=lambda s, p: (p.recompute_layers < 0) | is_divisor(p.virtual_pipeline, p.recompute_layers),
        says=lambda s, p: (
            f"Megatron recomputes equally many layers in each of a rank's {p.virtual_pipeline} stages: recomputing "
            f"{p.recompute_layers} layers of a rank must be a multiple"
        ),
        after="recomputed layers",
    ),
)

PRESET = Features(
    gradient_format=WireFormat.FP32,
    parameter_format=WireFormat.BF16,
    dispatcher=Dispatcher.ALL_TO_ALL,
    cuda_graphs=CudaGraphs.NONE,
    overlaps_experts=False,
    overlaps_tensor=False,
    drops_tokens=False,
    fuses_experts=False,
    fp8_attention=False,
    offloaded_activations=0.0,
)
"""Defaults of Megatron-LM and of Megatron-Bridge's classes."""

FACTS = EngineFacts(
    title="megatron 0.16",
    stack="megatron-bridge",
    stack_by_vendor=(("AMD", "primus-megatron"),),
    schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    uneven_layers=True,
    any_vocabulary=True,  # padded
    repeats_kv_heads=True,
    any_replicas=True,
    axis_orders=tuple(AxisOrder),
    loss="logits of all tokens of a micro-batch at once, in fp32 (vocab_parallel_cross_entropy)",
    switches=(
        ("gradient_format", ("fp32", "bf16")),
        ("drops_tokens", (True, False)),
        ("capacity_factor", AnyValue()),
        ("fp8_attention", (False,)),
        ("offloaded_activations", (0.0,)),
        ("fuses_experts", (False,)),
        ("dispatcher", ("all-to-all",)),
        ("cuda_graphs", ("none",)),
    ),
    exported_switches=(
        ("cuda_graphs", ("none", "partial", "full")),
        ("dispatcher", ("all-to-all", "deepep", "hybridep")),
        ("overlaps_experts", (True, False)),
        ("overlaps_tensor", (True, False)),
        ("attention", ("fa2", "fa3", "cudnn", "unfused")),
        ("parameter_format", ("fp8",)),
        ("fp8_attention", (True, False)),
        ("fuses_experts", (True, False)),
        ("offloaded_activations", AnyValue()),
    ),
    preset=lambda _, preset: PRESET if preset is Preset.ENGINE else RELEASE_DEFAULTS,
    rules=RULES,
    configurations=(".args", ".sh", ".yaml"),
    source="megatron-core 0.16.1: transformer/transformer_config.py, pipeline_parallel/schedules.py",
)
