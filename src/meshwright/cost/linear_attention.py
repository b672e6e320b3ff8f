"""Layers of linear attention by the gated delta rule: parameters, FLOPs, seconds and kept bytes.

    Gated DeltaNet  projections h x (2 K + 2 V + 2 n) and V x h for K = key heads x d_k and V = n value heads x d_v:
                    queries, keys, values, output gate, decay and write strength
    Kimi Delta      projections h x (2 K + V + n + 2 d_v), d_v x (K + V) and V x h: decays of channels and the output
                    gate have d_v numbers between two matrices
    both            a convolution over queries, keys and values, unit norms of queries and keys, the delta rule in
                    chunks of C tokens, and a gated norm of each head's output

FLOPs of the rule per head and token as flash-linear-attention 0.5 computes it (`chunk_gated_delta_rule`, `chunk_kda`):

    forward    2 C d_k scores of keys, 2/3 C^2 the triangular inverse, 2 C (d_k + d_v) W and U, 4 d_k d_v states,
               2 C (d_k + d_v) + 2 d_k d_v outputs
    backward   W, U and states again; 12 d_k d_v, 2 C (7 d_k + 4 d_v) and 4 C^2 of gradients

Kernels pass k, v, w, u, the scores and a state per chunk through memory. Their time is the longest of bytes over
bandwidth, FLOPs at the rate of attention, and FLOPs at the rate of one compute unit in tiles of 64 x 64 with
exponents and casts between them (calibration/data/delta_rule.toml). The kernel of the states works through
the chunks of a sequence one after another: it takes at least a fixed time for each, however few heads a rank
has.

Model FLOPs are Megatron-Core's count (training.py, `gdn_layer_flops`): projections, 2 k (2 K + V) for a convolution of
k tokens, and 8 n d_k d_v for the recurrence. It does not count Kimi Delta Attention, whose recurrence is the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.passes import PassTimes
from meshwright.cost.tables import ModelTable, PrecisionTable

STATE_SHARE = 1 / 3
"""Share of the rule's throughput-bound time in the kernels that work through a sequence: two of six products
of the chunk's size times d_k d_v run there, forward and backward (the formulas above)."""

KERNELS = 10
"""Kernels of one forward pass, besides projections: convolution, two norms, gates and their sums, scores with
the inverse, W and U, states, outputs, gated norm (flash-linear-attention)."""

NORM_ACCESSES = 3
"""Accesses of the gated norm: it reads output and gate, and writes their product."""


@dataclass(frozen=True, kw_only=True)
class RuleRates:
    """Rates of the delta rule's kernels: on one compute unit, and for chunks one after another."""

    forward_flops_per_s: tuple[float, float]  # of one compute unit: Gated DeltaNet, Kimi Delta Attention
    backward_flops_per_s: tuple[float, float]
    forward_chunk_s: float  # of one chunk after another
    backward_chunk_s: float


@cache
def rule_rates() -> RuleRates:
    """The rates of calibration/data/delta_rule.toml."""
    text = (files("meshwright.calibration") / "data" / "delta_rule.toml").read_text(encoding="utf-8")
    data: Mapping[str, Mapping[str, float]] = tomllib.loads(text)["rates"]
    gdn, kda = data["gdn"], data["kda"]
    return RuleRates(
        forward_flops_per_s=(gdn["forward_unit_flops_per_s"], kda["forward_unit_flops_per_s"]),
        backward_flops_per_s=(gdn["backward_unit_flops_per_s"], kda["backward_unit_flops_per_s"]),
        forward_chunk_s=gdn["forward_chunk_s"],
        backward_chunk_s=gdn["backward_chunk_s"],
    )


# --- parameters and FLOPs of one layer ---


def projected(model: ModelTable) -> tuple[Array, Array]:
    """(outputs of the projections of the layer's input, outputs that a second matrix reads)."""
    channel = model.linear_per_channel
    between = 2 * channel * model.linear_value_dim
    outputs = 2 * model.linear_keys + model.linear_values + model.linear_heads + between
    return outputs + (1 - channel) * (model.linear_values + model.linear_heads), between


def matrices(model: ModelTable) -> Array:
    """Parameters of the projections of one layer."""
    outputs, between = projected(model)
    second = between / 2 * (model.linear_keys + model.linear_values)
    return model.hidden * (outputs + model.linear_values) + second


def convolved(model: ModelTable) -> Array:
    """Channels of the convolution."""
    return 2 * model.linear_keys + model.linear_values


def other_parameters(model: ModelTable) -> Array:
    """Convolution, norm, and the decays' A of each head and bias of each head, or of each channel."""
    biases = np.where(model.linear_per_channel > 0, model.linear_keys, model.linear_heads)
    return convolved(model) * model.linear_kernel + model.linear_value_dim + model.linear_heads + biases


def model_flops_per_token(model: ModelTable) -> Array:
    """Forward FLOPs of one layer besides its projections: Megatron-Core's convolution and recurrence."""
    state = model.linear_key_dim * model.linear_value_dim
    return 2.0 * model.linear_kernel * convolved(model) + 8.0 * model.linear_heads * state


# --- seconds ---


def rule_flops_per_token(model: ModelTable) -> tuple[Array, Array]:
    """(forward, backward) FLOPs of the chunked rule over all heads."""
    k, v, chunk = model.linear_key_dim, model.linear_value_dim, model.linear_chunk
    forward = 6.0 * k * v + 2.0 * chunk * (3 * k + 2 * v) + 2 / 3 * chunk * chunk
    backward = 16.0 * k * v + 2.0 * chunk * (8 * k + 5 * v) + 4.0 * chunk * chunk
    return model.linear_heads * forward, model.linear_heads * backward


def rule_elements_per_token(model: ModelTable) -> tuple[Array, Array]:
    """(forward, backward) elements of 16 bits that the kernels of the rule read and write over all heads.

    Forward: scores and inverse k + C, W and U 2 (k + v) + C, states 2 k + 2 v + k v / C, outputs 2 k + 2 v + k v / C.
    Backward: W, U and states again, gradients of values 2 k + 2 v, of states 2 k + 3 v + 2 k v / C, of queries, keys
    and decays 6 k + 3 v + 2 k v / C, of W and U 5 k + 4 v + 2 C. Each kernel reads decays of channels in 32 bits.
    """
    k, v, chunk = model.linear_key_dim, model.linear_value_dim, model.linear_chunk
    states = k * v / np.maximum(chunk, 1)
    decays = model.linear_per_channel * 2 * k
    forward = 7 * k + 6 * v + 2 * chunk + 2 * states + 4 * decays
    backward = 19 * k + 16 * v + 3 * chunk + 5 * states + 7 * decays
    return model.linear_heads * forward, model.linear_heads * backward


def rule_passes(
    model: ModelTable,
    *,
    tokens: Array,
    seq_len: Array,
    tensor: Array,
    flops_per_s: Array,
    bytes_per_s: Array,
    num_units: Array,
) -> PassTimes:
    """Seconds of the delta rule of one layer. `flops_per_s`: rate of attention, forward and backward alike."""
    rates, work, moved = rule_rates(), rule_flops_per_token(model), rule_elements_per_token(model)
    chunks = seq_len / model.linear_chunk

    def seconds(index: int, unit_rates: tuple[float, float], chunk_s: float) -> Array:
        unit = np.where(model.linear_per_channel > 0, unit_rates[1], unit_rates[0])
        flops = tokens * work[index] / tensor
        at_units = np.where(np.asarray(num_units) > 0, flops / (unit * np.maximum(num_units, 1)), 0.0)
        bound = np.maximum(
            np.maximum(flops / flops_per_s, at_units), 2.0 * tokens * moved[index] / tensor / bytes_per_s
        )
        one_by_one = np.where(np.asarray(num_units) > 0, chunks * chunk_s, 0.0)
        return (1 - STATE_SHARE) * bound + np.maximum(STATE_SHARE * bound, one_by_one)

    return PassTimes(
        forward_s=seconds(0, rates.forward_flops_per_s, rates.forward_chunk_s),
        input_s=seconds(1, rates.backward_flops_per_s, rates.backward_chunk_s),
        weight_s=0.0,
    )


def elementwise_elements_per_token(model: ModelTable) -> Array:
    """Elements that convolution, norms and gates read and write forward.

    Queries and keys are repeated for each value head that they serve.
    """
    repeated = 2 * model.linear_heads * model.linear_key_dim
    decays = model.linear_per_channel * 3 * model.linear_keys
    prepared = 2 * model.linear_keys + repeated + 2 * model.linear_values + decays
    return 2 * convolved(model) + prepared + NORM_ACCESSES * model.linear_values


# --- memory ---


def kept_bytes_per_token(model: ModelTable, precision: PrecisionTable) -> Array:
    """Bytes of one layer between its passes.

    The convolution's input, normed and repeated queries and keys, values, the scores' inverse (of Kimi Delta Attention
    scores of queries too), decays, the rule's output, its gate and their product, which the output projection reads.
    """
    e, channel = precision.activation_bytes, model.linear_per_channel
    repeated = 2 * model.linear_heads * model.linear_key_dim
    scores = model.linear_heads * model.linear_chunk * (1 + channel)
    decays = channel * model.linear_keys
    inside = convolved(model) + repeated + 3 * model.linear_values + scores + decays
    return e * inside + precision.linear_input_bytes * model.linear_values + 12.0 * model.linear_heads
