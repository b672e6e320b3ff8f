"""Seconds of a step from its work and the efficiencies that measurements gave.

    linear      ((weights / B r)^p + (GEMM / P u + grouped / P u_g)^p)^(1/p)   the smooth maximum of a roofline, p = 4
    attention   the same of cached bytes / B r r_c and FLOPs / P16 u_a
    device      linear + attention + elementwise / B r + c collectives + dispatch + kernels l + sequences h_s
    step        device + host h, or their smooth maximum where the host schedules the next step meanwhile

P dense peak of the GEMM's format, P16 of 16 bits, B memory bandwidth. u, u_g, u_a, r, r_c: shares that kernels reach.
A GEMM of fewer tokens than the engine's tile reaches u_d of the others' rate (llama.cpp on a CPU). c: seconds of
collectives over those of `cost.collectives`, as engines have all-reduces of their own; it is not for the dispatch.
l: start and end of a kernel. h: scheduling; h_s: sampling and what waits for it, by engine; a request has a further
time outside of all steps, in which its prompt is tokenised.
A step with prompts has no CUDA graph but for few tokens: it takes at least the time in which the host starts kernels.
Williams et al. 2009 for the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.inference.work import StepWork

SHARPNESS = 4.0
"""p of the smooth maximum: kernels near the ridge reach neither bound."""


@dataclass(frozen=True, kw_only=True)
class ServingRates(Table):
    """Datasheet peaks, and the fitted values of `inference.constants` for one system and engine."""

    gemm_peak: Array  # FLOP/s of the GEMMs' format
    bf16_peak: Array
    memory_peak: Array  # bytes/s
    gemm_ratio: Array
    grouped_ratio: Array  # of gemm_ratio: grouped GEMMs of routed experts
    dot_ratio: Array  # of gemm_ratio: GEMMs of fewer tokens than a tile
    attention_ratio: Array
    memory_ratio: Array
    cache_ratio: Array  # of memory_ratio: reads of the KV cache
    elementwise_accesses: Array  # times that a hidden state is read and written in one layer
    collective_factor: Array
    collective_s: Array  # further seconds of one collective: synchronisation of ranks
    kernel_s: Array  # between the ends of two kernels that do nearly nothing
    eager_kernel_s: Array  # in which the host starts a kernel that no graph holds
    host_s: Array
    sequence_s: Array
    token_s: Array  # of a token of a prompt, outside of its steps: tokenising
    request_s: Array  # of a request, outside of its steps: connection, tokenising, admission, first answer


@dataclass(frozen=True, kw_only=True)
class StepSeconds(Table):
    """Seconds of one step by component."""

    linear: Array
    attention: Array
    elementwise: Array
    communication: Array
    launches: Array
    host: Array

    @property
    def total(self) -> Array:
        """The whole step."""
        return self.linear + self.attention + self.elementwise + self.communication + self.launches + self.host


def smooth_maximum(a: Array, b: Array) -> Array:
    """(a^p + b^p)^(1/p).

    >>> smooth_maximum(0.0, 2.0)
    2.0
    """
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


def step_seconds(work: StepWork, rates: ServingRates) -> StepSeconds:
    """Seconds of one step."""
    memory = rates.memory_peak * rates.memory_ratio
    gemm = rates.gemm_peak * rates.gemm_ratio
    math_s = work.gemm_flops / gemm + work.grouped_flops / (gemm * rates.grouped_ratio)
    math_s = math_s * np.where(work.is_tiled, 1.0, 1 / rates.dot_ratio)
    found = StepSeconds(
        linear=smooth_maximum(work.weight_bytes / memory, math_s),
        attention=smooth_maximum(
            work.cache_bytes / (memory * rates.cache_ratio),
            work.attention_flops / (rates.bf16_peak * rates.attention_ratio),
        ),
        elementwise=rates.elementwise_accesses * work.elementwise_bytes / memory,
        communication=work.collective_s * rates.collective_factor
        + work.dispatch_s
        + work.num_collectives * rates.collective_s,
        launches=work.num_kernels * rates.kernel_s,
        host=work.sequences * rates.sequence_s,
    )
    hidden_s = smooth_maximum(found.total, rates.host_s) - found.total
    return replace(found, host=found.host + np.where(work.is_overlapped, hidden_s, rates.host_s))


@dataclass(frozen=True, kw_only=True)
class Decoded(Table):
    """Seconds of the tokens that are decoded beside prompts: their step has read weights and started kernels."""

    linear: Array = 0.0
    math: Array = 0.0  # of them, what the read of the weights does not hide
    total: Array = 0.0
    mixes: Array = 0.0  # 1 where a step decodes beside prompts, 0 where prompts have steps of their own


NOTHING = Decoded()


def decoded_of(step: StepSeconds, prompt: StepWork, rates: ServingRates, mixes: Array) -> Decoded:
    """The same of a decode step. Prompts read the weights of `prompt`."""
    weights_s = prompt.weight_bytes / (rates.memory_peak * rates.memory_ratio)
    math_s = np.maximum(step.linear**SHARPNESS - weights_s**SHARPNESS, 0.0) ** (1 / SHARPNESS)
    return Decoded(linear=step.linear, math=math_s, total=step.total, mixes=mixes)


def prefill_seconds(
    work: StepWork, rates: ServingRates, num_steps: Array, *, count: Array = 1.0, uneven: Array = 1.0,
    eager_s: Array = 0.0, decoded: Decoded = NOTHING,
) -> StepSeconds:  # fmt: skip
    """Seconds that `count` prompts add to the steps that carry them.

    work: all tokens of one prompt. num_steps: steps that the prompts fill, a fraction where several share one. Weights,
    launches and the host are paid once per step. uneven: prompts of the fullest attention group, with which a step
    ends, over the mean. eager_s: in which the host starts the kernels of all steps.
    """
    gemm = rates.gemm_peak * rates.gemm_ratio
    memory = rates.memory_peak * rates.memory_ratio
    math_s = work.gemm_flops * count * uneven / gemm + work.grouped_flops * count / (gemm * rates.grouped_ratio)
    own = num_steps * (1 - decoded.mixes)
    shared = num_steps - own
    weights_s = num_steps * (work.weight_bytes / memory)
    linear = smooth_maximum(weights_s, math_s + shared * decoded.math) - shared * decoded.linear
    attention = smooth_maximum(
        work.cache_bytes * count * uneven / (memory * rates.cache_ratio),
        work.attention_flops * count * uneven / (rates.bf16_peak * rates.attention_ratio),
    )
    elementwise = rates.elementwise_accesses * (work.elementwise_bytes * count * uneven) / memory
    sent_s = work.collective_s * count * uneven * rates.collective_factor + work.dispatch_s * count * uneven
    communication = sent_s + own * work.num_collectives * rates.collective_s
    launches = own * work.num_kernels * rates.kernel_s
    host = own * rates.host_s * (1 - work.is_overlapped)
    device_s = linear + attention + elementwise + communication + launches + host + shared * decoded.total
    return StepSeconds(
        linear=linear, attention=attention, elementwise=elementwise, communication=communication,
        launches=launches + smooth_maximum(device_s, eager_s) - device_s, host=host,
    )  # fmt: skip
