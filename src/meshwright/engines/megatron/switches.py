"""Switches of software (`stack` of the run file) as settings of Megatron.

Meshwright's own processes set the format of gradients between ranks: they run without Transformer Engine, DeepEP and
CUDA graphs. The files for Megatron-LM and Megatron-Bridge set all that Megatron has a switch for. Names and values:
megatron-core 0.16.1, transformer/transformer_config.py.
"""

from __future__ import annotations

from typing import Any

from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, WireFormat
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

GRAPHS = {
    CudaGraphs.NONE: {"cuda_graph_impl": "none"},
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


def reduces_in_fp32(run: Run) -> bool:
    """True unless the run file says that gradients are accumulated and reduced in 16 bits."""
    return run.stack.features.gradient_format is not WireFormat.BF16


def gathers_in_fp8(run: Run) -> bool:
    """True if the run file says that parameters are gathered in 8 bits, which needs weights in 8 bits."""
    return run.stack.features.parameter_format is WireFormat.FP8 and run.precision.matmul == "fp8"


def transformer_switches(run: Run, plan: Plan) -> dict[str, Any]:
    """Settings of layers for programs with Transformer Engine, of the switches that the run file states."""
    features, has_experts = run.stack.features, run.model.experts is not None
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
    if features.attention is not None and features.attention in BACKENDS:
        found["attention_backend"] = BACKENDS[features.attention]
    return found
