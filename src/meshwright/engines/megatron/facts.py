"""Facts about Megatron-Core 0.16 for the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Mask
from meshwright.cost.tables import RECOMPUTES, PlanTable
from meshwright.engines.megatron.megatron_core.constructors import LOW_PRECISION
from meshwright.planner.engines import AnyValue, EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import has_experts, is_divisor
from meshwright.specs.features import (
    FORCED_BALANCE,
    RELEASE_DEFAULTS,
    CudaGraphs,
    Dispatcher,
    Features,
    Preset,
    WireFormat,
)
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


PARTS = (CudaGraphs.PARTIAL, CudaGraphs.STATE_SPACE)
"""CUDA graphs of parts of a layer."""


def _is_full(plan: PlanTable) -> NDArray[np.bool_]:
    return np.asarray(np.equal(plan.recompute, RECOMPUTES.index(Recompute.FULL)))


def _recomputes(plan: PlanTable, *modules: str) -> NDArray[np.bool_]:
    return np.asarray(np.any([np.asarray(plan.recomputes(module)) > 0 for module in modules], axis=0))


def _never_overlaps(s: LegalityContext, plan: PlanTable) -> Mask:
    """True where there is no communication of experts that overlaps."""
    return (not s.software.overlaps_experts) | (plan.expert == 1)


def _overlaps_model(s: LegalityContext, plan: PlanTable) -> Mask:
    """True where the numbers and predictions of the model let expert communication overlap."""
    one_in_a_pipeline = (s.model.num_mtp_layers == 1) & (np.asarray(plan.pipeline) > 1)
    return (s.precision != "fp32") & ((s.model.num_mtp_layers == 0) | one_in_a_pipeline)


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
        holds=lambda s, p: (s.optimizer.states is StateFormat.FP32) | (p.sharding == Sharding.OPTIMIZER),
        says="16-bit states need a sharded optimizer",
        key="optimizer.states",
        hint="parallel.sharding: optimizer",
    ),
    Rule(
        name="alternate GEMMs",
        holds=lambda _, p: p.recomputes("alternate_matmuls") == 0,
        says="alternate_matmuls exists only in torchtitan",
        key="parallel.recompute",
    ),
    Rule(
        name="recomputation under delayed scales",
        holds=lambda s, p: (s.precision != "fp8_delayed") | ~_recomputes(p, "norm", "activation"),
        says="delayed scales of fp8 do not support recomputation of norm and activation",
        key="parallel.recompute",
        hint="precision: fp8",
    ),
    Rule(
        name="recomputation in CUDA graphs",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (s.software.cuda_graphs not in PARTS) | ~_is_full(p),
        says=lambda s, _: f"{s.software.cuda_graphs} CUDA graphs do not hold layers that are recomputed as a whole",
        key="parallel.recompute",
        hint="stack.cuda_graphs: none",
    ),
    Rule(
        name="recomputed experts in CUDA graphs",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (s.software.cuda_graphs is not CudaGraphs.PARTIAL) | ~_recomputes(p, "moe"),
        says="partial CUDA graphs hold the router, which recomputing moe would repeat",
        key="parallel.recompute",
        hint="stack.cuda_graphs: none",
    ),
    Rule(
        name="recomputation under overlapped experts",
        holds=lambda s, p: _never_overlaps(s, p) | ~_is_full(p),
        says="expert communication overlaps (stack.overlaps_experts) only without full recomputation",
        key="parallel.recompute",
        hint="stack.overlaps_experts: false",
    ),
    Rule(
        name="overlapped experts of tensor ranks",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            (not (s.software.overlaps_experts and has_experts(s))) | (p.expert > 1) | (p.expert_tensor == 1)
        ),
        says="expert communication overlaps only with expert parallelism",
        key="parallel.expert",
        hint="stack.overlaps_experts: false",
    ),
    Rule(
        name="overlapped experts of virtual stages",
        scope=Scope.SHAPE,
        holds=lambda s, p: _never_overlaps(s, p) | (p.pipeline == 1) | (p.virtual_pipeline > 1),
        says="in a pipeline expert communication overlaps only with virtual stages",
        key="parallel.virtual_pipeline",
        hint="stack.overlaps_experts: false",
    ),
    Rule(
        name="overlapped experts of a model",
        scope=Scope.SHAPE,
        holds=lambda s, p: _never_overlaps(s, p) | _overlaps_model(s, p),
        says="expert communication overlaps only in 16 bits, and with multi-token prediction only of one token in a "
        "pipeline",
        key="stack.overlaps_experts",
        hint="stack.overlaps_experts: false",
    ),
    Rule(
        name="overlapped experts in CUDA graphs",
        scope=Scope.SHAPE,
        holds=lambda s, p: _never_overlaps(s, p) | (s.software.cuda_graphs is not CudaGraphs.FULL),
        says="expert communication does not overlap in CUDA graphs of the whole iteration",
        key="stack.overlaps_experts",
        hint="stack.cuda_graphs: partial",
    ),
    Rule(
        name="offloaded states without a distributed optimizer",
        holds=lambda s, p: (np.asarray(p.offload_optimizer) == 0) | (p.sharding == Sharding.OPTIMIZER),
        says="Megatron keeps optimizer states in host memory only where its distributed optimizer shards them",
        key="parallel.offload",
        hint="parallel.sharding: zero1",
    ),
    Rule(
        name="offloaded states in 16 bits",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (np.asarray(p.offload_optimizer) == 0) | (s.optimizer.states is StateFormat.FP32),
        says="Megatron keeps optimizer states in host memory in fp32 only: must be none",
        key="parallel.offload",
        hint="optimizer.states: fp32",
    ),
    Rule(
        name="offloaded states and gathers in 8 bits",
        holds=lambda s, p: (np.asarray(p.offload_optimizer) == 0) | (s.software.parameter_format is not WireFormat.FP8),
        says="Megatron gathers weights in 8 bits from optimizer states on the device only",
        key="stack.parameter_format",
        hint="parallel.offload: none",
    ),
    Rule(
        name="offloaded activations in a pipeline",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not s.software.offloaded_activations) | (np.asarray(p.pipeline) == 1),
        says="Megatron does not offload activations under a pipeline",
        key="stack.offloaded_activations",
        hint="parallel.pipeline: 1",
    ),
    Rule(
        name="offloaded activations under recomputation",
        holds=lambda s, p: (not s.software.offloaded_activations) | (p.recompute == RECOMPUTES.index(Recompute.NONE)),
        says="Megatron does not offload activations under recomputation",
        key="stack.offloaded_activations",
        hint="parallel.recompute: none",
    ),
    Rule(
        name="recomputed layers of stages",
        holds=_recomputes_equally,
        says=lambda s, p: (
            f"Megatron recomputes equally many layers in each of a rank's {p.virtual_pipeline} stages: "
            f"{p.recompute_layers} of a rank cannot be split so"
        ),
        key="parallel.recompute.layers",
        hint=lambda _, p: f"parallel.recompute.layers: {p.recompute_layers // p.virtual_pipeline * p.virtual_pipeline}",
        after="recomputed layers",
    ),
)

PRESET = Features(
    gradient_format=WireFormat.FP32,
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


def _agreed(stated: Features, known: Features) -> Features:
    """Switches of a recipe that exclude each other: what the run states stays, or else DeepEP and overlapped experts.

    DeepEP does not pad experts to a capacity; recipes of Megatron-Bridge 25.09 have either the one or the other. Those
    of 26.06 and later overlap experts in CUDA graphs of the whole iteration, which the engine's release does not.
    """
    agreed = RELEASE_DEFAULTS
    if known.has_capacity and known.dispatcher is Dispatcher.DEEPEP:
        if not stated.has_capacity:
            agreed = Features(drops_tokens=False)
        elif stated.dispatcher is None:
            agreed = Features(dispatcher=Dispatcher.ALL_TO_ALL)
    if known.overlaps_experts and known.cuda_graphs is CudaGraphs.FULL:
        if stated.cuda_graphs is None:
            agreed = replace(agreed, cuda_graphs=CudaGraphs.PARTIAL)
        elif stated.overlaps_experts is None:
            agreed = replace(agreed, overlaps_experts=False)
    return agreed


FACTS = EngineFacts(
    title="megatron 0.16",
    stack="megatron-bridge",
    stack_by_vendor=(("AMD", "primus-megatron"),),
    vendors=("NVIDIA", "AMD", "generic"),  # AMD's PyTorch answers to torch.cuda; a CPU rehearses without it
    vendors_source="megatron-core 0.16.1: tensor_parallel/layers.py (tensors on torch.cuda.current_device())",
    precisions=("fp32", "bf16", *LOW_PRECISION),
    schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    shardings=(Sharding.NONE, Sharding.OPTIMIZER),  # of all data ranks; sharded parameters are not lowered
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    uneven_layers=True,
    any_vocabulary=True,  # padded
    axis_orders=tuple(AxisOrder),
    loss="logits of all tokens of a micro-batch at once, in fp32 (fused_vocab_parallel_cross_entropy)",
    offloads_optimizer=True,
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
        ("expert_imbalance", (FORCED_BALANCE,)),
    ),
    preset=lambda _model, preset, _device: PRESET if preset is Preset.ENGINE else RELEASE_DEFAULTS,
    agreed=_agreed,
    rules=RULES,
    configurations=(".args", ".sh", ".yaml"),
    source="megatron-core 0.16.1: transformer/transformer_config.py, pipeline_parallel/schedules.py",
)
