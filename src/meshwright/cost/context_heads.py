"""Seconds in which context ranks swap their part of the sequence for a part of the heads.

A scan needs the whole sequence. Before the convolution an all-to-all gives each rank all tokens of 1/c of the heads;
after the gated norm another gives it its tokens of all heads back. The work of a rank does not change. Values
of a token that a tensor rank sends, with t tensor and c context ranks:

    state space      there  (2 d + n) / t and 2 N max(G / t, c)     back  d / t
    Gated DeltaNet   there  (2 K + 2 V + 2 n) / t                   back  V / t

Groups of a state-space block are repeated where they are fewer than ranks. Each way values are packed for the
all-to-all, and put in the order that attention's load balancing had left. The backward pass reverses both.

Source: Megatron-Core, megatron/core/ssm/mamba_context_parallel.py and gated_delta_net/common.py.
"""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.collectives import Group, all_to_all_s
from meshwright.cost.tables import ModelTable, PlanTable

COPIES = 4
"""Reads and writes of a value each way: packing, and the order of the sequence."""

STATE_SPACE_CALLS = 5
"""All-to-alls before a state-space block: gate, inputs, both groups and steps; Gated DeltaNet needs one."""


def has_scans(model: ModelTable) -> bool:
    """True if any layer has a state that goes through the sequence."""
    return bool(np.any(model.state_space_share) or np.any(model.linear_share))


def swap_s(
    model: ModelTable, plan: PlanTable, tokens: Array, *, group: Group, element_bytes: Array, element_s: Array
) -> Array:
    """Seconds of one pass of a mean layer on one rank, forward or backward; `element_s`: per 16-bit element moved."""

    def seconds(there: Array, back: Array, calls: int) -> Array:
        sent = element_bytes * tokens * there / calls
        collectives = calls * all_to_all_s(sent, group) + all_to_all_s(element_bytes * tokens * back, group)
        return collectives + COPIES * tokens * (there + back) * element_s

    t, c = plan.tensor, plan.context
    groups = 2 * model.state_size * np.maximum(model.state_groups / t, c)
    state = seconds((2 * model.state_inner + model.state_heads) / t + groups, model.state_inner / t, STATE_SPACE_CALLS)
    rule = 2 * (model.linear_keys + model.linear_values + model.linear_heads) / t
    linear = seconds(rule, model.linear_values / t, 1)
    both = model.state_space_share * state + model.linear_share * linear
    return np.where(c > 1, both, 0.0)
