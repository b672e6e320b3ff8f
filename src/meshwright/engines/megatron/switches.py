"""Switches of software (`stack` of the run file) as settings of Megatron.

Meshwright's own processes set the format of gradients between ranks and the capacity of experts: they run without
Transformer Engine, DeepEP and CUDA graphs. The files for Megatron-LM and Megatron-Bridge set all that Megatron has a
switch for. Names and values: megatron-core 0.16.1, transformer/transformer_config.py. Attention in fp8 and fused
experts have no option of Megatron-LM core_v0.16.1: only the file for Megatron-Bridge 0.6.2 sets them.
"""

from __future__ import annotations

from typing import Any

from meshwright.catalog.stacks import switches_of
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, WireFormat
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

GRAPHS = {
    CudaGraphs.NONE: {"cuda_graph_impl": "none"},
    CudaGraphs.STATE_SPACE: {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mamba"]},
    CudaGraphs.PARTIAL: {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    CudaGraphs.FULL: {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
}
GRAPHS_OF_EXPERTS = ["moe_router", "moe_preprocess"]
"""Parts of a mixture that partial graphs hold besides attention."""

DISPATCHERS = {
    Dispatcher.ALL_TO_ALL: {"moe_token_dispatcher_type": "alltoall"},
    Dispatcher.DEEPEP: {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    Dispatcher.HYBRIDEP: {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
BACKENDS = {
    AttentionKernel.FA2: "flash",
    AttentionKernel.FA3: "flash",
    AttentionKernel.CUDNN: "fused",
    AttentionKernel.UNFUSED: "unfused",
}


FUSED_EXPERTS = {"use_transformer_engine_op_fuser": True, "moe_mlp_glu_interleave_size": 32}
"""Fused grouped GEMMs of experts, as Megatron-Bridge's `cutedsl_fused_grouped_mlp` sets them."""
FUSED_EXPERTS_ENV = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Variable of Transformer Engine without which Megatron-Core 0.19 refuses them."""
FUSED_IN = "mxfp8"  # the precision for which these kernels exist


def reduces_in_fp32(run: Run) -> bool:
    """True unless the run file says that gradients are accumulated and reduced in 16 bits."""
    return switches_of(run).gradient_format is not WireFormat.BF16


def gathers_in_fp8(run: Run) -> bool:
    """True if the run file says that parameters are gathered in 8 bits, which needs weights in 8 bits."""
    return switches_of(run).parameter_format is WireFormat.FP8 and run.precision.matmul == "fp8"


def capacity(run: Run) -> dict[str, Any]:
    """Settings of experts with a capacity, to which all are padded; none where the run file states no capacity."""
    features = switches_of(run)
    if not features.has_capacity or run.model.experts is None:
        return {}
    return {
        "moe_expert_capacity_factor": features.busiest_expert_ratio,
        "moe_pad_expert_input_to_capacity": True,
    }


def offloaded_layers(run: Run) -> float:
    """Layers whose saved activations are kept in host memory; a fraction where the share of the run file is none."""
    share = switches_of(run).offloaded_activations or 0.0
    layers = share * run.model.num_layers
    return round(layers) if abs(layers - round(layers)) < LAYER_TOLERANCE else layers


LAYER_TOLERANCE = 0.05
"""Of a layer: a share with two decimals need not be exact."""


def attends_in_fp8(run: Run) -> bool:
    """True if scores and values are multiplied in 8 bits."""
    return bool(switches_of(run).fp8_attention)


def fuses_experts(run: Run) -> bool:
    """True if grouped GEMMs of experts quantise, activate and permute by themselves."""
    is_fused = run.stack.features.fuses_experts or (
        switches_of(run).fuses_experts and run.precision.name == FUSED_IN
    )
    return bool(is_fused) and run.model.experts is not None


def bridge_switches(run: Run) -> dict[str, Any]:
    """Settings of layers that only Megatron-Bridge's release of Megatron-Core has."""
    return FUSED_EXPERTS if fuses_experts(run) else {}


def transformer_switches(run: Run, plan: Plan) -> dict[str, Any]:
    """Settings of layers for programs with Transformer Engine, of the switches that the run file states."""
    features, has_experts = switches_of(run), run.model.experts is not None
    found: dict[str, Any] = {}
    if features.cuda_graphs is not None:
        found |= GRAPHS[features.cuda_graphs]
        if features.cuda_graphs is CudaGraphs.PARTIAL and has_experts:
            found["cuda_graph_scope"] = [*found["cuda_graph_scope"], *GRAPHS_OF_EXPERTS]
    if features.dispatcher is not None and has_experts:
        found |= DISPATCHERS[features.dispatcher]
    if features.overlaps_experts is not None and plan.expert > 1:
        found["overlap_moe_expert_parallel_comm"] = features.overlaps_experts
    if features.overlaps_tensor is not None and plan.tensor > 1:
        found["tp_comm_overlap"] = features.overlaps_tensor
    # Without it Transformer Engine chooses, and the release says what it chooses: another choice may not run here.
    if run.stack.features.attention in BACKENDS:
        found["attention_backend"] = BACKENDS[run.stack.features.attention]
    if num_offloaded := offloaded_layers(run):
        found |= {"cpu_offloading": True, "cpu_offloading_num_layers": num_offloaded}
    return found
