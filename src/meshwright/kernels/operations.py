"""The operations of this room and the names of their routes, as a table for run files too. Imports no PyTorch.

The module of an operation has `ROUTES`, all its routes by name; only its functions import Triton. The module of its
kernels has `SOURCES`, which `inspection` compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: its formula, the modules of its routes and of its Triton kernels, names of its routes."""

    name: str
    computes: str
    module: str
    kernels: str | None
    routes: tuple[str, ...]


TRITON = "triton"
"""The route of our own kernels."""


def _operation(
    name: str, computes: str, module: str, kernels: str, *, routes: str = f"reference {TRITON}"
) -> Operation:
    """An operation of modules in this room; its routes by name, with spaces between them."""
    module, kernels = (f"{__package__}.{place}" for place in (module, kernels))
    return Operation(name=name, computes=computes, module=module, kernels=kernels, routes=tuple(routes.split()))


_TABLE = (
    _operation(
        "linear_cross_entropy",
        "loss of a head's logits in chunks of tokens, with its gradients; vocabulary-parallel too",
        "linear_cross_entropy",
        "cross_entropy_triton",
        routes="reference cached triton liger",
    ),
    _operation(
        "cross_entropy",
        "loss of logits, which their gradient overwrites",
        "cross_entropy",
        "cross_entropy_triton",
        routes="reference cached triton liger",
    ),
    _operation(
        "swiglu",
        "silu(gate) up, gelu(gate) up and the clamped form of gpt-oss",
        "gated_activation",
        "gated_activation_triton",
        routes="reference triton liger",
    ),
    _operation(
        "rms_norm",
        "RMSNorm, and with the addition to the residual stream before it",
        "rms_norm",
        "rms_norm_triton",
        routes="reference triton liger transformer_engine aiter",
    ),
    _operation(
        "rotary",
        "rotary position embedding of queries and keys in one pass",
        "rotary",
        "rotary_triton",
        routes="reference triton liger",
    ),
    _operation(
        "adamw",
        "AdamW with clipping, in one pass; optimizer states in fp32, bf16 or 8 bits",
        "adamw",
        "adamw_triton",
        routes="reference fused triton",
    ),
    _operation(
        "fp8_cast",
        "cast of a matrix and of its transpose to 8 bits, with scales of tensors, rows, blocks or MX",
        "fp8.casting",
        "fp8.triton_cast",
    ),
    _operation(
        "fp8_gated_cast",
        "gated activation cast to 8 bits with its transpose, never written in 16",
        "fp8.gated_casting",
        "fp8.triton_gated_cast",
    ),
    _operation(
        "fp8_gated_gradients",
        "gradients of gate and up cast to 8 bits with their transposes, never written in 16",
        "fp8.gated_casting",
        "fp8.triton_gated_cast",
    ),
    _operation(
        "fp8_gemm",
        "GEMM of two matrices in 8 bits with their scales",
        "fp8.gemm",
        "fp8.triton_gemm",
        routes="reference triton scaled_mm",
    ),
    _operation(
        "attention",
        "attention over ranges of keys: causal, packed documents, windows, capped scores, sinks",
        "attention.operation",
        "attention.triton_attention",
        routes="reference blockwise sdpa flash cudnn flex triton transformer_engine aiter",
    ),
    _operation(
        "grouped_gemm",
        "GEMMs of groups of rows, each with the matrix of its expert",
        "experts.grouped_gemm",
        "experts.grouped_gemm_triton",
        routes="reference grouped_mm triton",
    ),
    _operation(
        "fp8_grouped_gemm",
        "GEMMs of groups of rows in 8 bits with their scales, and the gradients of the matrices",
        "fp8.grouped_gemm",
        "fp8.triton_grouped_gemm",
        routes="reference triton scaled_grouped_mm",
    ),
    _operation(
        "router",
        "scores, limits of groups, top-k, weights of experts, and the logarithm for a z-loss",
        "experts.router",
        "experts.router_triton",
    ),
    _operation(
        "permute", "tokens copied to rows sorted by expert", "experts.permutation", "experts.permutation_triton"
    ),
    _operation(
        "unpermute", "weighted sums of the rows of each token", "experts.permutation", "experts.permutation_triton"
    ),
)

STORED_FORMATS = ("e4m3", "int8")
"""Formats of stored activations. Modules without a format get the first: `docs/reference/convergence.md`."""

OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _TABLE}
"""Every operation by name."""
