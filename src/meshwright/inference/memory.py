"""Bytes of weights and KV cache, of the whole model and of one device of a replica.

    weights      matrices of layers x bytes of the format + (embeddings, head, norms, biases, router) x 2
    K/V, GQA     2 K d values per token and layer; T devices hold K/T heads each, at least one
    K/V, MLA     r + d_r values per token and layer: one latent for all heads, whole on each tensor rank
    window       a layer with a sliding window keeps its last w tokens at most

DeepSeek-V2 (arXiv 2405.04434), section 2.1, for the latent cache. A multi-token prediction module is loaded only for
speculative decoding, and is not counted otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from meshwright.cost.flops import Parameters, count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.inference.formats import KEPT_BYTES, StorageFormat
from meshwright.inference.layout import ServingLayout
from meshwright.specs.model import AttentionKind, Model

EXPERTS_ONLY = frozenset({"GptOssForCausalLM"})
"""Families whose 4-bit checkpoints quantise experts and nothing else (OpenAI 2025, gpt-oss Model Card)."""


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a model's weights by part; `*_layer` are of one layer."""

    attention_layer: float
    dense_layer: float
    expert: float  # one routed expert
    shared_layer: float
    kept_layer: float  # norms and biases
    router_layer: float
    embedding: float
    head: float  # output matrix; 0 when it is the embedding
    num_layers: int
    num_dense_layers: int
    num_moe_layers: int
    num_experts: int

    @property
    def experts_layer(self) -> float:
        """All routed experts of one layer."""
        return self.num_experts * self.expert

    @property
    def total(self) -> float:
        """The whole model."""
        body = self.num_layers * (self.attention_layer + self.kept_layer)
        moe = self.num_moe_layers * (self.experts_layer + self.shared_layer + self.router_layer)
        return body + self.num_dense_layers * self.dense_layer + moe + self.embedding + self.head

    def on_device(self, layout: ServingLayout) -> float:
        """The fullest device: the first pipeline stage holds the embedding, the last the head."""
        group = layout.group_size
        share = -(-self.num_layers // layout.pipeline) / self.num_layers
        body = self.num_layers * (self.attention_layer / layout.tensor + self.kept_layer)
        moe = self.num_moe_layers * (
            self.experts_layer / (layout.expert * layout.expert_tensor) + self.shared_layer / group + self.router_layer
        )
        layers = (body + self.num_dense_layers * self.dense_layer / group + moe) * share
        ends = (self.embedding, self.head) if layout.pipeline > 1 else (self.embedding + self.head,)
        return layers + max(ends) / group


@cache
def served(model: Model) -> Model:
    """The model without prediction modules, which only speculative decoding loads.

    Raises InputError for hybrids, compressed and linear attention and full layers of another shape, whose states and
    caches are not modelled, for latent experts and for hyper-connections.
    """
    if model.attention.kind is AttentionKind.SHARED:
        raise InputError(f"{model.name}: serving models with compressed attention is not estimated")
    if model.attention.full_layers is not None:
        raise InputError(f"{model.name}: serving models with full layers of another shape is not estimated")
    if model.linear_attention is not None:
        raise InputError(
            f"{model.name}: serving models with linear attention is not estimated",
            hint="its states have one size whatever the context; `plan` and `estimate` cost its training",
        )
    if model.layer_pattern:
        raise InputError(f"{model.name}: serving models with state-space layers is not estimated")
    if model.experts is not None and model.experts.latent:
        raise InputError(
            f"{model.name}: serving models with latent experts is not estimated",
            got=f"experts.latent: {model.experts.latent}",
        )
    if model.residual_streams > 1:
        raise InputError(
            f"{model.name}: serving models with hyper-connections is not estimated",
            got=f"residual_streams: {model.residual_streams}",
        )
    return replace(model, num_mtp_layers=0)


@cache
def parameters(model: Model) -> Parameters:
    """Parameter counts of the model as it is served."""
    return count_parameters(model_row(served(model)))


def keeps_attention(model: Model, stored: StorageFormat) -> bool:
    """Return True if the matrices of attention stay in 16 bits while others are quantised."""
    return stored.is_quantised and (stored.ffn_only or model.family in EXPERTS_ONLY)


def weight_bytes(model: Model, stored: StorageFormat) -> WeightBytes:
    """Bytes of the weights of `model` in the format `stored`."""
    counts = parameters(model)
    expert = stored.bytes_per_value
    matrix = KEPT_BYTES if stored.is_quantised and model.family in EXPERTS_ONLY else expert
    attention = KEPT_BYTES if keeps_attention(model, stored) else matrix
    kept = KEPT_BYTES if stored.is_quantised else expert
    return WeightBytes(
        attention_layer=float(counts.attention_layer) * attention,
        dense_layer=float(counts.dense_ffn_layer) * matrix,
        expert=float(counts.expert) * expert,
        shared_layer=float(counts.shared_layer) * matrix,
        kept_layer=float(counts.norm_layer) * kept,
        router_layer=float(counts.router_layer) * kept,
        embedding=float(counts.embedding) * kept,
        head=float(counts.head) * kept,
        num_layers=model.num_layers,
        num_dense_layers=model.num_dense_layers,
        num_moe_layers=model.num_moe_layers,
        num_experts=model.experts.num_experts if model.experts else 0,
    )


# --- KV cache ---


def cached_values(model: Model) -> int:
    """Values that one token adds to the cache of one layer, over all heads; with an indexer its key too.

    >>> from meshwright import catalog
    >>> cached_values(catalog.model("llama3.1-405b")) * 126, cached_values(catalog.model("deepseek-v3")) * 61
    (258048, 35136)
    """
    a = model.attention
    if a.kind is AttentionKind.MLA:
        return a.kv_lora_rank + a.rope_head_dim + (a.indexer.head_dim if a.indexer else 0)
    return a.num_kv_heads * (a.head_dim + a.v_dim)


def cached_tokens(model: Model, context: float) -> float:
    """Sum over layers of the tokens that are kept for a session of `context` tokens."""
    windowed = model.num_windowed_layers
    kept = min(context, model.attention.window) if windowed else 0
    return (model.num_layers - windowed) * context + windowed * kept


@cache
def without_windows(model: Model) -> Model:
    """The model as an engine caches it that keeps all tokens of every layer."""
    return replace(model, attention=replace(model.attention, window=0, num_windowed_layers=0, window_pattern=()))


def window_note(model: Model, context: float, *, windowed_cache: bool = True) -> str | None:
    """Caution for sessions longer than a sliding window; None where no layer keeps less than the whole session."""
    kept = cached_tokens(model, context)
    if kept == model.num_layers * context:
        return None
    engine = "an engine without a windowed cache" if windowed_cache else "this engine has no windowed cache and"
    return (
        f"{model.num_windowed_layers} of {model.num_layers} layers need their last {model.attention.window:,} tokens; "
        f"{engine} holds {model.num_layers * context / kept:.2g} times as much for a session of {context:,.0f} tokens"
    )


def session_bytes(model: Model, stored: StorageFormat, context: float) -> float:
    """KV cache of one session of `context` tokens, over all heads and layers, each value counted once."""
    return cached_values(model) * cached_tokens(model, context) * stored.bytes_per_value


def session_bytes_on_device(model: Model, stored: StorageFormat, context: float, layout: ServingLayout) -> float:
    """KV cache of one session on one of the devices that hold it: `tensor` of them in every pipeline stage."""
    layers = -(-model.num_layers // layout.pipeline) / model.num_layers
    return session_bytes(model, stored, context) * layers / cache_split(model, layout)


def cache_split(model: Model, layout: ServingLayout) -> int:
    """Devices over which the heads of one token's cache are split: no more than it has heads."""
    a = model.attention
    return 1 if a.kind is AttentionKind.MLA else min(layout.tensor, a.num_kv_heads)
