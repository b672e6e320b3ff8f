"""Work of one step on one device: bytes, FLOPs and communication, before any efficiency.

A step processes `tokens` tokens per attention group: decoded tokens, one per sequence, or tokens of prompts.

    weight_bytes        every matrix once; of the routed experts those that some token chose:
                        E (1 - (1 - k/E)^n) of n tokens, and under expert parallelism the fullest device
    cache_bytes         cached keys and values (or latents) that the tokens attend to
    gemm_flops          2 x parameters a token uses x tokens
    attention_flops     2 H (d + d_v) per token and key; with latents and decoding 2 H (2 r + d_r), the absorbed form of
                        DeepSeek-V2 (arXiv 2405.04434), section 2.1.2
    elementwise_bytes   norms, residuals, quantisation: hidden states read and written, not split over tensor ranks
    collective_s        two all-reduces a layer, by `cost.collectives`
    dispatch_s          tokens to experts and back where attention is data-parallel, by the same

Expected number of experts chosen: each token draws k of E without replacement, uniformly (balanced routing).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.calibration.collectives import constants_for
from meshwright.cost.collectives.network import Group, group, network_row
from meshwright.cost.collectives.operations import (
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    reduce_scatter_s,
    send_receive_s,
)
from meshwright.inference.formats import StorageFormat, computed_in
from meshwright.inference.layout import ServingLayout
from meshwright.inference.memory import (
    WeightBytes,
    cache_split,
    cached_values,
    keeps_attention,
    parameters,
    served,
    weight_bytes,
)
from meshwright.specs.hardware import Accelerator, Cluster, Fabric
from meshwright.specs.model import AttentionKind, Model

HIDDEN_BYTES = 2
"""Bytes of a hidden state's element between layers and on the wire."""


@dataclass(frozen=True, kw_only=True)
class StepWork(Table):
    """Work of one step on the busiest device, of all its layers. Seconds of communication are nominal."""

    weight_bytes: Array
    cache_bytes: Array
    gemm_flops: Array
    grouped_flops: Array  # of routed experts
    attention_flops: Array
    elementwise_bytes: Array  # of one read and one write per layer
    collective_s: Array
    num_collectives: Array
    dispatch_s: Array
    num_kernels: Array  # of all layers that a token passes, collectives aside
    sequences: Array  # that get a token in this step, of one replica
    is_overlapped: Array = 0.0  # 1: the host prepares the next step while the device computes this one
    is_tiled: Array  # 1: GEMMs have enough tokens for the engine's tiles; 0: they are dot products

    def plus(self, other: StepWork) -> StepWork:
        """The sum, field by field: two batches in one step read the weights twice here, which bounds it from above."""
        return StepWork(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model in its formats on one layout of a cluster."""

    model: Model
    cluster: Cluster
    weights: StorageFormat
    cache: StorageFormat
    layout: ServingLayout
    draft: Model | None = None  # model that drafts tokens, on the same devices


def step_work(
    of: Served, *, sequences: Array, tokens: float, context: float, decoding: bool, tile_tokens: int = 1,
    prefix: float = 0.0,
) -> StepWork:  # fmt: skip
    """Work of a step.

    sequences: of one replica; an array gives a table. tokens: new tokens of each (1 when decoding). context: mean keys
    that a token attends to. tile_tokens: fewest tokens of a GEMM that the engine computes as one. prefix: keys of a
    prompt that the cache holds already.
    """
    model, layout = served(of.model), of.layout
    held = _weights(of.model, of.weights)
    per_group = sequences * tokens / layout.attention_data
    collective_s, num_collectives = _communication(of, per_group)
    return StepWork(
        weight_bytes=_weights_read(held, model, layout, sequences * tokens),
        cache_bytes=_cache_read(of, sequences / layout.attention_data, context if decoding else prefix),
        gemm_flops=2 * _dense_parameters(of, model) * per_group,
        grouped_flops=2 * _expert_parameters(model) / layout.group_size * sequences * tokens,
        attention_flops=per_group * (
            _attention_flops(model, decoding=decoding) / layout.tensor * _mean_keys(model, context)
            + _index_flops(model, context)
        ),
        elementwise_bytes=2 * HIDDEN_BYTES * model.hidden * model.num_layers * per_group,
        collective_s=collective_s,
        num_collectives=num_collectives,
        dispatch_s=_dispatch_s(of, per_group) if layout.attention_data > 1 else 0.0,
        num_kernels=kernels(model)[0],
        sequences=sequences,
        is_tiled=np.where(per_group >= tile_tokens, 1.0, 0.0),
    )  # fmt: skip


def drafting_work(of: Served, *, sequences: Array, context: float, drafted: int) -> StepWork | None:
    """Work of drafting `drafted` tokens one after the other for each sequence; None without a draft model."""
    if of.draft is None or drafted == 0:
        return None
    drafting = replace(of, model=of.draft, draft=None)
    one = step_work(drafting, sequences=sequences, tokens=1, context=context, decoding=True)
    several = {f.name: getattr(one, f.name) * drafted for f in fields(one)}
    return StepWork(**several | {"sequences": 0.0, "is_tiled": one.is_tiled})


def prediction_module(model: Model) -> Model | None:
    """One layer of the model as its multi-token prediction module drafts with it; None without modules."""
    if model.num_mtp_layers == 0:
        return None
    experts = None if model.experts is None else replace(model.experts, num_dense_layers=0)
    return replace(model, num_layers=1, num_mtp_layers=0, experts=experts)


# --- kernels ---


@cache
def kernels(model: Model) -> tuple[int, int]:
    """(kernels that engines start for all layers, those of them between the GEMMs of attention), as in vLLM 0.11.

    models/llama.py, deepseek_v2.py: norm, projections, norms of queries and keys, rotary embedding, a write to the
    cache, attention and the sum of its parts, output; with latents the projections into and out of them, too. A block:
    norm, two GEMMs with the activation between. Experts (layers/fused_moe): norm, router, top-k, two that sort tokens,
    two GEMMs with the activation between, the weighted sum; shared ones: a block without norm, and an addition.
    """
    latent = model.attention.kind is AttentionKind.MLA
    inside = 5 if latent else 4 + model.attention.qk_norm
    attention = inside + (5 if latent else 3)
    experts = 9 + (1 if model.experts is not None and model.experts.num_shared else 0)
    layers = attention * model.num_layers + 4 * model.num_dense_layers + experts * model.num_moe_layers
    return layers, inside * model.num_layers


# --- weights ---


@cache
def _weights(model: Model, stored: StorageFormat) -> WeightBytes:
    return weight_bytes(model, stored)


def experts_chosen(num_experts: float, top_k: float, tokens: Array) -> Array:
    """Expected number of different experts that `tokens` tokens choose.

    >>> [round(experts_chosen(256, 8, n)) for n in (1, 8, 16, 32, 64, 128)]
    [8, 57, 102, 163, 222, 252]
    """
    return num_experts * -np.expm1(tokens * math.log1p(-top_k / num_experts)) if top_k < num_experts else num_experts


def fullest(mean: Array, most: float, devices: int) -> Array:
    """Expected number of experts on the fullest of `devices`, where each has `mean` of `most` on average.

    Mean plus sqrt(2 ln n) standard deviations of a hypergeometric count, never above `most`: the usual bound on the
    maximum of n Gaussians.
    """
    spread = np.sqrt(np.maximum(mean * (1 - mean / most), 0.0)) if most else 0.0
    return np.minimum(mean + math.sqrt(2 * math.log(devices)) * spread if devices > 1 else mean, most)


def _weights_read(held: WeightBytes, model: Model, layout: ServingLayout, tokens: Array) -> Array:
    """Bytes of one pass through all layers, and the output head."""
    body = held.num_layers * (held.attention_layer / layout.tensor + held.kept_layer)
    dense = held.num_dense_layers * held.dense_layer / layout.group_size
    moe: Array = 0.0
    if model.experts is not None:
        local = held.num_experts / layout.expert
        chosen = experts_chosen(held.num_experts, model.experts.top_k, tokens)
        busiest = fullest(chosen / layout.expert, local, layout.expert)
        routed = busiest * held.expert / layout.expert_tensor
        moe = held.num_moe_layers * (routed + held.shared_layer / layout.group_size + held.router_layer)
    return body + dense + moe + (held.head or held.embedding) / layout.group_size


def _dense_parameters(of: Served, model: Model) -> float:
    """Parameters of one device that each token of its group multiplies, routed experts excluded.

    A matrix of attention in 16 bits counts by the ratio of its GEMM time to the time in the format of the weights.
    """
    counts, layout = parameters(model), of.layout
    attention = model.num_layers * float(counts.attention_layer) / layout.tensor * _attention_time(of)
    ffn = model.num_dense_layers * float(counts.dense_ffn_layer)
    shared = model.num_moe_layers * float(counts.shared_layer)
    return attention + (ffn + shared + model.vocab * model.hidden) / layout.tensor


def _attention_time(of: Served) -> float:
    """Time of a GEMM of attention over one in the format of the weights: above 1 where it stays in 16 bits."""
    peaks = of.cluster.accelerator.peak_flops_per_s
    if not keeps_attention(of.model, of.weights) or "bf16" not in peaks:
        return 1.0
    return peaks[computed_in(of.weights, of.cluster.accelerator)] / peaks["bf16"]


def _expert_parameters(model: Model) -> float:
    """Parameters of routed experts that one token uses."""
    top_k = model.experts.top_k if model.experts else 0
    return model.num_moe_layers * top_k * float(parameters(model).expert)


# --- attention ---


def _mean_keys(model: Model, context: float) -> float:
    """Keys that a token attends to, summed over layers."""
    if (indexer := model.attention.indexer) is not None:
        return model.num_layers * min(context, indexer.top_k)
    windowed = model.num_windowed_layers
    return (model.num_layers - windowed) * context + windowed * min(context, model.attention.window)


def _attention_flops(model: Model, *, decoding: bool) -> float:
    """FLOPs of one token and one key, over all heads of a layer."""
    a = model.attention
    if a.kind is AttentionKind.MLA and decoding:
        return 2 * a.num_heads * (2 * a.kv_lora_rank + a.rope_head_dim)
    return 2 * a.num_heads * (a.head_dim + a.v_dim)


def _index_flops(model: Model, context: float) -> float:
    """FLOPs of one token's scores of all keys by the indexers of all layers, on every tensor rank."""
    indexer = model.attention.indexer
    return 2 * model.num_layers * indexer.num_heads * indexer.head_dim * context if indexer else 0.0


def _cache_read(of: Served, sequences: Array, context: float) -> Array:
    """Bytes of the cache that a device reads; a prompt's own keys come from registers and cache lines."""
    indexer = of.model.attention.indexer
    index_values = indexer.head_dim if indexer else 0  # of every key; the rest of the selected ones
    attended = _mean_keys(of.model, context) * (cached_values(of.model) - index_values)
    values = (attended + of.model.num_layers * context * index_values) / cache_split(of.model, of.layout)
    return sequences * values * of.cache.bytes_per_value


# --- communication ---


def group_on(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """Ranks of one communicator of a cluster."""
    return _group(Placed(cluster), size, stride)


_LINKS = tuple(f.name for f in fields(Fabric) if f.name != "sources")
_DEVICE = tuple(f.name for f in fields(Accelerator) if f.name not in ("peak_flops_per_s", "aliases", "sources"))


class Placed:
    """A cluster that a cache can hold: equal to others of the same devices and links with nodes of the same size."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        fabric, device = cluster.fabric, cluster.accelerator
        self.key = (
            *(getattr(fabric, name) for name in _LINKS),
            *(getattr(device, name) for name in _DEVICE),
            *sorted(device.peak_flops_per_s.items()),
            cluster.devices_per_node,
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placed) and other.key == self.key


@lru_cache(maxsize=256)
def _group(placed: Placed, size: int, stride: int) -> Group:
    fabric = placed.cluster.fabric
    net = network_row(fabric, constants_for(fabric), devices_per_node=placed.cluster.devices_per_node)
    return group(size=size, stride=stride, net=net)


TINY_BYTES = 64.0
"""A message whose time is latency."""


def _communication(of: Served, tokens: Array) -> tuple[Array, float]:
    """(seconds of one step's messages beyond their latency, number of collectives). `tokens` per attention group.

    Attention: an all-reduce over tensor ranks. Feed-forward: the same over the stage where all ranks have the same
    tokens; where they have tokens of their own, two messages whose seconds are `_dispatch_s`.
    """
    model, layout = of.model, of.layout
    message = tokens * model.hidden * HIDDEN_BYTES
    seconds: Array = 0.0
    count = 0
    if layout.tensor > 1:
        reductions = model.num_layers * (2 if layout.attention_data == 1 else 1)
        seconds += reductions * _beyond_latency(all_reduce_s, message, group_on(of.cluster, layout.tensor))
        count += reductions
    if layout.attention_data > 1:
        count += 2 * model.num_layers
    if layout.pipeline > 1:
        stage = group_on(of.cluster, layout.pipeline, layout.group_size)
        seconds += (layout.pipeline - 1) * _beyond_latency(send_receive_s, message, stage)
        count += layout.pipeline - 1
    return seconds, count


def _dispatch_s(of: Served, tokens: Array) -> Array:
    """Seconds that the bytes of one step take to experts and back. `tokens` per attention group.

    A dense block, and a group of no more ranks than a token has experts, gathers the tokens of all ranks and
    reduce-scatters the results (TensorRT-LLM, `select_alltoall_method_type`: no all-to-all where the ranks are no more
    than top_k; the default of vLLM and SGLang). In larger groups a token goes once to each node and rank that has one
    of its experts, in 8 bits where GEMMs have no more, and comes back in 16 (DeepSeek-V3, arXiv 2412.19437, 3.2.2).
    """
    model, layout = of.model, of.layout
    message = tokens / layout.tensor * model.hidden * HIDDEN_BYTES
    ranks = group_on(of.cluster, layout.group_size)
    num_gathered, dispatched_s = model.num_layers, 0.0
    if model.experts is not None and layout.group_size > model.experts.top_k:
        num_gathered = model.num_layers - model.num_moe_layers
        to_ranks = partial(
            all_to_all_hierarchical_s, copies=model.experts.top_k * layout.expert_tensor,
            max_domains=model.experts.groups_per_token,
        )  # fmt: skip
        is_wide = computed_in(of.weights, of.cluster.accelerator) not in ("fp8", "fp4")
        out_and_back = (message * (1.0 if is_wide else 0.5), message)
        dispatched_s = sum(_beyond_latency(to_ranks, sent, ranks) for sent in out_and_back)
    gathered = message * layout.group_size
    gathered_s = sum(_beyond_latency(of_all, gathered, ranks) for of_all in (all_gather_s, reduce_scatter_s))
    return num_gathered * gathered_s + model.num_moe_layers * dispatched_s


def _beyond_latency(operation: Callable[[Array, Group], Array], message: Array, ranks: Group) -> Array:
    """Seconds that the bytes of a message add to a tiny one: engines have kernels of their own for tiny ones."""
    return np.maximum(operation(message, ranks) - operation(TINY_BYTES, ranks), 0.0)
