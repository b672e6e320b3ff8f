"""Model FLOPs utilization (MFU): one definition for predictions, trainings and benchmarks.

    MFU = tokens/s/device x F / peak        a ratio

F is `flops.model_flops_per_token`: forward and backward without recomputation. Attention is counted as that function
is asked to count it: causal (`AttentionCount.CAUSAL`) wherever Meshwright prints an MFU. `peak` is one device's dense
peak of the format that the linear layers multiply in, or the GEMM rate measured on a device without a datasheet.
Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B, which counts the full score matrix instead.
"""

from __future__ import annotations

from meshwright.arrays import Array

MFU_CONVENTION = "model FLOPs, causal attention, no recomputation"
"""Convention of the MFU in records."""

MFU_DEFINITION = (
    "model FLOPs utilization: forward and backward without recomputation, causal attention counted at half, "
    "one multiply-add is 2 FLOP, over the dense peak of the format that the linear layers multiply in"
)
"""Convention of the MFU in full, for the endnotes of reports."""


def mfu(*, tokens_per_s_per_device: Array, flops_per_token: Array, peak_flops_per_s: Array) -> Array:
    """Return the MFU, a ratio.

    >>> mfu(tokens_per_s_per_device=10_000.0, flops_per_token=50e9, peak_flops_per_s=1e15)
    0.5
    """
    return tokens_per_s_per_device * flops_per_token / peak_flops_per_s
