"""Tensors that a software stack keeps, and its allocator overhead: calibration/data/memory.toml.

Traits come from the source or the paper of the stack. Only the constants at the end are fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from meshwright.arrays import Array, Table
from meshwright.catalog.stacks import features_of, stack_facts
from meshwright.files import toml_table
from meshwright.specs.features import WIRE_BYTES, AttentionKernel, Features
from meshwright.specs.hardware import Stack

_FILE = Path(__file__).parent / "data" / "memory.toml"


@dataclass(frozen=True, kw_only=True)
class MemoryConstants(Table):
    """Traits and measured constants of one stack. Traits without a unit are 0 or 1."""

    accumulates_in_16_bits: Array  # gradients are accumulated in 16 bits, not in fp32
    second_gradient_bytes: Array  # per parameter: 16-bit gradients in addition to the accumulated ones
    bucket_gradient_bytes: Array  # per unsharded parameter: buckets of the reduction beside the gradients
    step_gradient_bytes: Array  # per parameter of an optimizer shard: fp32 gradients made for the update
    gradients_as_they_come: Array  # gradients are allocated during backward, not before
    optimizer_in_16_bits: Array  # no fp32 master weights, optimizer states in 16 bits
    splits_by_cost: Array  # the pipeline split counts the output head as layers
    unfused_attention: Array  # the s x s probabilities are kept
    probability_bytes: Array  # per probability that unfused attention keeps, copies and masks included
    keeps_dropout_masks: Array  # of both residual branches
    keeps_gathered_inputs: Array  # linear layers keep their input gathered over tensor ranks, not their part
    norm_copy_bytes: Array  # per element and norm: fp32 copies that an unfused norm keeps
    ffn_copies: Array  # 16-bit copies of f kept in addition to gate, up and their product
    blockwise_attention: Array  # the probabilities of earlier keys are kept, in blocks of queries
    keeps_named_only: Array  # policies keep the tensors they name: what only recomputed modules need is made again
    gathers_matrices: Array  # FSDP gathers one matrix after the other, embedding and head too, not layers
    gathers_keys: Array  # keys and values of all context ranks are gathered, and kept for the backward pass
    frozen_in_16_bits: Array  # frozen weights stay in 16 bits under recipes that multiply in fewer
    frozen_bytes: Array  # of a frozen weight that is wider than its GEMMs' inputs; 0: as `frozen_in_16_bits` says
    splits_logits: Array  # logits stay split over tensor ranks in the loss
    logits_bytes: Array  # per logit at the loss's peak: 16-bit logits and gradient, fp32 copies
    frees_head: Array  # logits and their gradient are gone before a layer is recomputed
    chunk_logits: Array  # logits that are in memory at once; 0: those of a micro-batch
    chunk_hidden_bytes: Array  # per element of hidden states under chunks that the run asks for; 0: there are none
    whole_chunk: Array  # all logits are, where they take no more than the fp32 sum that several chunks need
    head_gradient_bytes: Array  # per parameter of the head: weight gradient before it is accumulated
    waiting_buffers: Array  # tensors gathered over tensor ranks that wait for another stream
    waiting_buffers_in_pipeline: Array  # the same with a pipeline, which waits for neighbours in any case
    workspace_bytes: Array  # GEMM and attention workspaces, buckets
    context_bytes: Array  # outside the allocator: driver context, kernels
    communicator_bytes: Array  # outside the allocator, per communicator of a rank
    fragmentation_ratio: Array  # reserved / allocated - 1, of temporary tensors
    wire_gradient_bytes: Array  # of a gradient that waits for its reduction; 0: as the precision recipe says
    wire_parameter_bytes: Array  # of a gathered parameter; 0: as the precision recipe says
    reduces_once: Array  # shards of gradients come with the last micro-batch of a step, whole ones are kept before
    offloaded_activations: Array  # share of the saved activations that is kept in host memory
    keeps_masters: Array  # that FSDP shards stay on the device when optimizer states are offloaded
    busiest_expert_ratio: Array  # tokens of the busiest expert rank over the mean, or the capacity of all
    pads_experts: Array  # `StackFacts.pads_experts`


def memory_constants(
    stack: Stack,
    *,
    unfused_attention: bool | None = None,
    fused_norm: bool = False,
    routes: Mapping[str, str] | None = None,
    on_cpu: bool = False,
    precision: str = "",
) -> MemoryConstants:
    """The constants of a stack: the defaults, overridden by its lineage's and then by its own.

    unfused_attention: overrides the default of the stack. fused_norm: the run replaced the stack's norms by a
    fused kernel. routes: kernels by operation, as in a run file; others are the stack's own on GPUs, or
    `on_cpu`. precision: name of the run's recipe, which decides switches of the stack's release; empty: none
    of them. Raises UnknownNameError for an unknown stack.
    """
    named = tuple(sorted((routes or {}).items()))
    return _constants(stack, unfused_attention, fused_norm, named, on_cpu, precision)


@cache
def _constants(
    stack: Stack,
    unfused_attention: bool | None,
    fused_norm: bool,
    routes: tuple[tuple[str, str], ...],
    on_cpu: bool,
    precision: str,
) -> MemoryConstants:
    facts, sections = stack_facts(stack.framework), toml_table(_FILE)
    own = sections.get(stack.framework, {})
    values = sections["default"] | sections.get(facts.lineage, {}) | own
    on_device = own.get("cpu", {}) if on_cpu else {}
    values |= {key: value for key, value in on_device.items() if key != "routes"}
    for op, route in (on_device.get("routes", {}) | dict(routes)).items():
        values |= own.get("routes", {}).get(op, {}).get(route, {})
    features = features_of(stack, precision=precision)
    values |= _switched(features, accumulates_as_reduced=bool(values["accumulates_as_reduced"]))
    # A gradient that waits for its reduction is one of shards.
    values["wire_gradient_bytes"] = facts.shard_bytes(features, precision) or values["wire_gradient_bytes"]
    values["unfused_attention"] = int(
        features.attention is AttentionKernel.UNFUSED if unfused_attention is None else unfused_attention
    )
    values["keeps_masters"] = int(facts.keeps_masters)
    values["pads_experts"] = facts.pads_experts(features)
    if fused_norm:
        values["norm_copy_bytes"] = 0
    return MemoryConstants(**{f.name: values[f.name] for f in fields(MemoryConstants)})


def _switched(features: Features, *, accumulates_as_reduced: bool) -> dict[str, float]:
    """Constants that follow from a stack's switches."""
    gradient, parameter = (
        WIRE_BYTES[kind] if kind else 0.0 for kind in (features.gradient_format, features.parameter_format)
    )
    accumulated = {"accumulates_in_16_bits": int(gradient <= 2)} if accumulates_as_reduced and gradient else {}
    return {
        "wire_gradient_bytes": gradient,
        "wire_parameter_bytes": parameter,
        "reduces_once": float(bool(features.reduces_once)),
        "offloaded_activations": features.offloaded_activations or 0.0,
        "busiest_expert_ratio": features.busiest_expert_ratio,
        **accumulated,
    }
