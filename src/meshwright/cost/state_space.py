"""Seconds of a state-space block (Mamba-2) for one micro-batch on one rank.

    projections    two GEMMs: h x (2 d + 2 G N + n) and d x h, of d = n heads x head_dim, G groups, states of N
    scan           in chunks of Q tokens, by kernel: seconds are the longer of FLOPs and bytes of each pass

Per token, FLOPs, and 16-bit elements that kernels read and write, with S = d N / Q of the states and C = d + 2 G N:

    forward            FLOPs            elements
    convolution                         2 C
    cumulative decay                    5 n                          steps in fp32
    states of chunks   2 d N            d + G N + 2 S                written in fp32
    passed states                       3 S
    scores             2 Q G N          2 G N + 2 Q G                written in fp32
    scan               2 d N + 2 Q d    4 d + G N + 2 Q G + S        gate read; gated output and its input written
    gated norm                          2 d

    backward: the first five again (nothing of them is saved), then
    norm and gate                       9 d
    states             2 d N            d + G N + 2 S
    passed states                       5 S
    inputs             2 d N + 2 Q d    3 d + G N + 2 Q G + S
    B and C            4 d N            2 d + 6 G N + 2 S
    scores             2 Q d            2 d + 2 Q G
    of them B and C    4 Q G N          8 G N + 4 Q G
    decay              2 Q d            2 d + 2 Q G + 8 n
    convolution                         3 C

These are the kernels of `mamba_split_conv1d_scan_combined` (state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py),
which Megatron-Core, NeMo AutoModel and transformers call; FLOPs as Dao and Gu 2024, arXiv 2405.21060, section 6.
Bytes are counted kernel by kernel, so no calibrated factor of fused kernels is on top; arithmetic has the rate of
attention. A compute unit moves at most the bytes/s of an H100's (`UNIT_BYTES_PER_S`, an assumption). No part
of it is calibrated by itself.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.passes import PassTimes
from meshwright.cost.tables import ModelTable, PlanTable
from meshwright.cost.unit_ports import PORTED, UNIT_PORT_BYTES_PER_S, unit_bytes_per_s
from meshwright.specs.hardware import Accelerator

UNIT_BYTES_PER_S = 1 / (132 / 3.35e12 + 1 / UNIT_PORT_BYTES_PER_S)
"""Bytes that one compute unit moves for these kernels at most, an assumption: what an H100's memory gives each of its
own. They are tiles of registers in Triton, tuned there, and keep no more loads in flight where memory is
faster: kernels of the delta rule (`cost.linear_attention`) run at one rate a unit on H200 and GB200, where
memory gives each 36 and 53 GB/s."""

FORWARD_KERNELS = 7
BACKWARD_KERNELS = 17
"""Kernels of a pass besides both projections, as above; the norm's backward pass has two."""

TRITON_LAUNCHES = 3.0
"""Host time of a launch from Triton over one from C++: 0.096 against 0.023 ms (triton-lang/triton issue 459,
2022), and half as much since (pull request 3638: 108 to 49 us)."""

OTHER_FORWARD_LAUNCHES = 9
"""Launches from C++ of a forward pass: norm, cast, GEMM and gather before the scan, convolution; cast, GEMM, scatter
and residual after it."""

OTHER_BACKWARD_LAUNCHES = 16
"""Other launches of a backward pass: four GEMMs with their casts, the convolution twice, the norm, sums of biases."""


def launches() -> float:
    """Launches of one pass of a block in units of those from C++, mean of forward and backward.

    >>> round(launches(), 1)
    45.5
    """
    forward = OTHER_FORWARD_LAUNCHES + TRITON_LAUNCHES * (FORWARD_KERNELS - 1)  # the convolution is not Triton's
    backward = OTHER_BACKWARD_LAUNCHES + TRITON_LAUNCHES * (BACKWARD_KERNELS - 1)
    return (forward + backward) / 2


def scan_pace(accelerator: Accelerator) -> float:
    """Seconds of the scan's bytes over a streaming kernel's seconds: a GPU's compute units may move less.

    >>> from meshwright import catalog
    >>> [round(scan_pace(catalog.accelerator(name)), 1) for name in ("h100", "b200", "tpu7x")]
    [1.0, 1.8, 1.0]
    """
    if accelerator.vendor not in PORTED:  # another scan
        return 1.0
    return max(unit_bytes_per_s(accelerator) / UNIT_BYTES_PER_S, 1.0)


def scan_flops_per_token(model: ModelTable) -> Array:
    """Forward FLOPs of the chunked algorithm."""
    return _chunk_flops(model) + 4.0 * model.state_size * model.state_inner


def scan_backward_flops_per_token(model: ModelTable) -> Array:
    """Backward FLOPs, with the scores and states that are computed again."""
    return 3.0 * _chunk_flops(model) + 10.0 * model.state_size * model.state_inner


def _chunk_flops(model: ModelTable) -> Array:
    """FLOPs of the scores of all pairs of a chunk, and of the values that they weigh."""
    return 2.0 * model.state_chunk * (model.state_groups * model.state_size + model.state_inner)


def scan_elements_per_token(model: ModelTable) -> tuple[Array, Array]:
    """16-bit elements that all kernels but the projections' read and write, forward and backward."""
    d, n, channels = model.state_inner, model.state_heads, model.state_convolved
    groups, scores = model.state_groups * model.state_size, model.state_groups * model.state_chunk
    states = d * model.state_size / np.maximum(model.state_chunk, 1)
    again = 2 * channels + 5 * n + (d + groups + 2 * states) + 3 * states + (2 * groups + 2 * scores)
    forward = again + (4 * d + groups + 2 * scores + states) + 2 * d
    backward = again + 19 * d + 16 * groups + 10 * scores + 10 * states + 8 * n + 3 * channels
    return forward, backward


def scan_passes(
    model: ModelTable, plan: PlanTable, tokens: Array, *, element_s: Array, flops_per_s: Array, kernel_s: Array
) -> PassTimes:
    """Seconds of all but the projections, mean over a hybrid's layers. `element_s`: per 16-bit element moved."""
    forward, backward = scan_elements_per_token(model)

    def seconds(flops: Array, elements: Array, kernels: int) -> Array:
        longer = np.maximum(flops / flops_per_s, elements * element_s)
        return model.state_space_share * (tokens * longer / plan.tensor + kernels * kernel_s)

    return PassTimes(
        forward_s=seconds(scan_flops_per_token(model), forward, FORWARD_KERNELS),
        input_s=seconds(scan_backward_flops_per_token(model), backward, BACKWARD_KERNELS),
        weight_s=0.0,
    )


def kept_bytes_per_token(model: ModelTable) -> Array:
    """Bytes of one block between its passes: outputs of the first projection, of the scan, of the gate, of the norm.

    The backward pass computes the tensors between convolution and scan again.
    """
    return 2.0 * (model.state_inner + model.state_convolved + model.state_heads + 3 * model.state_inner)
