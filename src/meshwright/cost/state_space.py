"""Seconds of a state-space block (Mamba-2) for one micro-batch on one rank.

    projections    two GEMMs: h x (2 d + 2 G N + n) and d x h, of d = n heads x head_dim, G groups, states of N
    scan           in chunks of Q tokens: scores within a chunk 2 Q (G N + d), states in and out 4 N d FLOP per token
    memory         convolution, gate, norm and scan read and write their channels; one state of d N per chunk

The scan's time is the longer of its arithmetic at the rate of attention and its bytes, and both are added to the
convolution's and the norm's. Dao and Gu 2024, arXiv 2405.21060, section 6 (FLOPs of the chunked algorithm).
Nothing of it is calibrated: no published row of a hybrid with its layout is known.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.tables import ModelTable, PlanTable

BACKWARD_RATIO = 2.0
"""Backward over forward: the scan runs once more for each of its two inputs."""


def scan_flops_per_token(model: ModelTable) -> Array:
    """Forward FLOPs of the chunked algorithm."""
    chunk = model.state_chunk
    within = 2.0 * chunk * (model.state_groups * model.state_size + model.state_inner)
    return within + 4.0 * model.state_size * model.state_inner


def scan_elements_per_token(model: ModelTable) -> Array:
    """Elements that convolution, scan, gate and norm read and write forward."""
    convolution = 2.0 * model.state_convolved
    scan = model.state_convolved + model.state_heads + model.state_inner
    # A state per chunk in fp32, written and read: four 16-bit elements each.
    states = 4.0 * model.state_inner * model.state_size / np.maximum(model.state_chunk, 1)
    return convolution + scan + states + 3.0 * model.state_inner


def scan_s(
    model: ModelTable,
    plan: PlanTable,
    tokens: Array,
    *,
    element_s: Array,
    flops_per_s: Array,
    kernel_s: Array,
) -> Array:
    """Forward seconds of all but the projections, mean over a hybrid's layers. `element_s`: per element moved."""
    arithmetic = tokens * scan_flops_per_token(model) / plan.tensor / flops_per_s
    memory = tokens * scan_elements_per_token(model) / plan.tensor * element_s
    return model.state_space_share * (np.maximum(arithmetic, memory) + 4 * kernel_s)


def kept_bytes_per_token(model: ModelTable) -> Array:
    """Bytes of one block between its passes: what the projections, convolution, scan and norm saved.

    The output of the first projection, that of the convolution, the scan's, the normed one, and states in fp32.
    """
    inputs = model.state_inner + model.state_convolved + model.state_heads
    states = 4.0 * model.state_inner * model.state_size / np.maximum(model.state_chunk, 1)
    return 2.0 * (inputs + model.state_convolved + 2 * model.state_inner) + states
