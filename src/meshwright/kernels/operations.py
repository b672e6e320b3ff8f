"""The operations of this room and the names of their routes, as a table for run files too. Imports no PyTorch.

The module of an operation has `ROUTES`, all its routes by name; only its functions import Triton. The module of its
kernels has `SOURCES`, which `inspection` compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: what it computes, the modules of its routes and of its Triton kernels, names of its routes."""

    name: str
    computes: str
    module: str
    kernels: str | None
    routes: tuple[str, ...]


_TABLE = (
    Operation(
        name="linear_cross_entropy",
        computes="loss of a head's logits in chunks of tokens, with its gradients; vocabulary-parallel too",
        module="meshwright.kernels.linear_cross_entropy",
        kernels="meshwright.kernels.cross_entropy_triton",
        routes=("reference", "cached", "triton", "liger"),
    ),
    Operation(
        name="cross_entropy",
        computes="loss of logits, which their gradient overwrites",
        module="meshwright.kernels.cross_entropy",
        kernels="meshwright.kernels.cross_entropy_triton",
        routes=("reference", "cached", "triton", "liger"),
    ),
    Operation(
        name="swiglu",
        computes="silu(gate) up, gelu(gate) up and the clamped form of gpt-oss",
        module="meshwright.kernels.gated_activation",
        kernels="meshwright.kernels.gated_activation_triton",
        routes=("reference", "triton", "liger"),
    ),
    Operation(
        name="rms_norm",
        computes="RMSNorm, and with the addition to the residual stream before it",
        module="meshwright.kernels.rms_norm",
        kernels="meshwright.kernels.rms_norm_triton",
        routes=("reference", "triton", "liger", "transformer_engine", "aiter"),
    ),
    Operation(
        name="rotary",
        computes="rotary position embedding of queries and keys in one pass",
        module="meshwright.kernels.rotary",
        kernels="meshwright.kernels.rotary_triton",
        routes=("reference", "triton", "liger"),
    ),
    Operation(
        name="adamw",
        computes="AdamW with clipping, in one pass; optimizer states in fp32, bf16 or 8 bits",
        module="meshwright.kernels.adamw",
        kernels="meshwright.kernels.adamw_triton",
        routes=("reference", "fused", "triton"),
    ),
    Operation(
        name="gradient_norm",
        computes="norm of all gradients, each read once",
        module="meshwright.kernels.adamw",
        kernels="meshwright.kernels.adamw_triton",
        routes=("reference", "foreach", "triton"),
    ),
    Operation(
        name="fp8_cast",
        computes="cast of a matrix and of its transpose to 8 bits, with scales of tensors, rows, blocks or MX",
        module="meshwright.kernels.fp8.casting",
        kernels="meshwright.kernels.fp8.triton_cast",
        routes=("reference", "triton"),
    ),
    Operation(
        name="fp8_gated_cast",
        computes="gated activation cast to 8 bits with its transpose, never written in 16",
        module="meshwright.kernels.fp8.gated_casting",
        kernels="meshwright.kernels.fp8.triton_gated_cast",
        routes=("reference", "triton"),
    ),
    Operation(
        name="fp8_gated_gradients",
        computes="gradients of gate and up cast to 8 bits with their transposes, never written in 16",
        module="meshwright.kernels.fp8.gated_casting",
        kernels="meshwright.kernels.fp8.triton_gated_cast",
        routes=("reference", "triton"),
    ),
    Operation(
        name="fp8_gemm",
        computes="GEMM of two matrices in 8 bits with their scales",
        module="meshwright.kernels.fp8.gemm",
        kernels="meshwright.kernels.fp8.triton_gemm",
        routes=("reference", "triton", "scaled_mm"),
    ),
    Operation(
        name="attention",
        computes="attention over ranges of keys: causal, packed documents, windows, capped scores, sinks",
        module="meshwright.kernels.attention.operation",
        kernels="meshwright.kernels.attention.triton_attention",
        routes=(
            "reference",
            "blockwise",
            "sdpa",
            "flash",
            "cudnn",
            "flex",
            "triton",
            "transformer_engine",
            "aiter",
        ),
    ),
    Operation(
        name="grouped_gemm",
        computes="GEMMs of groups of rows, each with the matrix of its expert",
        module="meshwright.kernels.experts.grouped_gemm",
        kernels="meshwright.kernels.experts.grouped_gemm_triton",
        routes=("reference", "grouped_mm", "triton"),
    ),
    Operation(
        name="fp8_grouped_gemm",
        computes="GEMMs of groups of rows in 8 bits with their scales, and the gradients of the matrices",
        module="meshwright.kernels.fp8.grouped_gemm",
        kernels="meshwright.kernels.fp8.triton_grouped_gemm",
        routes=("reference", "triton", "scaled_grouped_mm"),
    ),
    Operation(
        name="router",
        computes="scores, limits of groups, top-k, weights of experts, and the logarithm for a z-loss",
        module="meshwright.kernels.experts.router",
        kernels="meshwright.kernels.experts.router_triton",
        routes=("reference", "triton"),
    ),
    Operation(
        name="permute",
        computes="tokens copied to rows sorted by expert",
        module="meshwright.kernels.experts.permutation",
        kernels="meshwright.kernels.experts.permutation_triton",
        routes=("reference", "triton"),
    ),
    Operation(
        name="unpermute",
        computes="weighted sums of the rows of each token",
        module="meshwright.kernels.experts.permutation",
        kernels="meshwright.kernels.experts.permutation_triton",
        routes=("reference", "triton"),
    ),
)

TRITON = "triton"
"""The route of our own kernels."""

STORED_FORMATS = ("e4m3", "int8")
"""Formats of stored activations. The first is what modules without a format get: `docs/reference/convergence.md`."""

OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _TABLE}
"""Every operation by name."""
