"""Facts about Megatron-Core 0.16 for the planner."""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Mask
from meshwright.cost.tables import PlanTable
from meshwright.planner.engines import AnyValue, EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import has_experts, is_divisor
from meshwright.specs.plan import AxisOrder, Recompute, Schedule, Sharding
from meshwright.specs.run import StateFormat


def _recomputes_equally(s: LegalityContext, plan: PlanTable) -> Mask:
    """Each stage of a rank recomputes the same number of layers, which it has."""
    stages = plan.pipeline * plan.virtual_pipeline
    ends = s.model.num_layers - (stages - 2) * -(-s.model.num_layers // np.maximum(stages, 1))
    fewest = np.where(np.asarray(plan.fewest_layers) < 0, ends // 2, plan.fewest_layers)
    even = is_divisor(plan.virtual_pipeline, plan.recompute_layers)
    fits = plan.recompute_layers <= fewest * plan.virtual_pipeline
    return (plan.recompute_layers < 0) | (plan.virtual_pipeline == 1) | (even & fits)


RULES = (
    Rule(
        name="experts of tensor ranks",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not has_experts(s)) | (p.expert > 1) | (p.expert_tensor == p.tensor),
        says=lambda _, p: (
            "without expert parallelism Megatron does not sum the gradients of experts over tensor ranks: "
            f"must be {p.tensor}"
        ),
        key="parallel.expert_tensor",
        hint=lambda _, p: f"parallel.expert: {p.tensor} splits them over the same ranks",
        after="expert folding",
    ),
    Rule(
        name="narrow states",
        scope=Scope.CHOICE,
        holds=lambda s, p: (s.optimizer.states is StateFormat.FP32) | (p.sharding == Sharding.OPTIMIZER),
        says=lambda _, __: "16-bit states need a sharded optimizer",
        key="optimizer.states",
        hint=lambda _, __: "parallel.sharding: optimizer",
    ),
    Rule(
        name="alternate GEMMs",
        scope=Scope.CHOICE,
        holds=lambda _, p: p.recomputes("alternate_matmuls") == 0,
        says=lambda _, __: "alternate_matmuls exists only in torchtitan",
        key="parallel.recompute",
    ),
    Rule(
        name="recomputed layers of stages",
        scope=Scope.CHOICE,
        holds=_recomputes_equally,
        says=lambda s, p: (
            f"Megatron recomputes equally many layers in each of a rank's {p.virtual_pipeline} stages: "
            f"{p.recompute_layers} of a rank cannot be split so"
        ),
        key="parallel.recompute.layers",
        hint=lambda _, p: (
            f"parallel.recompute.layers: {p.recompute_layers // p.virtual_pipeline * p.virtual_pipeline}"
        ),
        after="recomputed layers",
    ),
)

FACTS = EngineFacts(
    title="megatron 0.16",
    stack="megatron-bridge",
    stack_by_vendor=(("AMD", "primus-megatron"),),
    schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    shardings=(Sharding.NONE, Sharding.OPTIMIZER),  # of all data ranks; sharded parameters are not lowered
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    uneven_layers=True,
    any_vocabulary=True,  # padded
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
    rules=RULES,
    configurations=(".args", ".sh", ".yaml"),
    source="megatron-core 0.16.1: transformer/transformer_config.py, pipeline_parallel/schedules.py",
)
