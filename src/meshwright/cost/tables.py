"""Structs of arrays: the cost model is written once, for one plan and for a million.

Every formula in `cost` is plain arithmetic on the fields of these tables. A field is a number or a NumPy array;
arrays broadcast. To cost one plan all fields are numbers; to screen a search the plan's fields are arrays and the
model's are numbers; to calibrate, one row is one published run and every field is an array.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np

from meshwright.arrays import Array, Integers, Table
from meshwright.cost.pipeline.schedules import rank_layers, shape_of
from meshwright.specs.adapters import quantised_base, sizes_of_adapters
from meshwright.specs.model import (
    QKV,
    AttentionKind,
    BaseFormat,
    BlockKind,
    Experts,
    LinearKind,
    Lora,
    Model,
    NormPlacement,
    StateSpace,
)
from meshwright.specs.plan import (
    ALL_TOKENS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    STORED_MODULES,
    AxisOrder,
    Offload,
    Plan,
    Recompute,
)
from meshwright.specs.precision import Precision

RECOMPUTES = tuple(Recompute)
STORED_BYTES = 1 + 4 / 128
"""Bytes of a value kept in 8 bits, int8 or e4m3: one scale in fp32 for 128 values."""


class WeightCache(IntEnum):
    """Cache of quantised weights."""

    CALIBRATED = 0  # neither bytes nor casts are counted
    AUTO = 1
    ON = 2
    OFF = 3


@dataclass(frozen=True, kw_only=True)
class ModelTable(Table):
    """Shapes of a model (see `specs.model` for symbols)."""

    hidden: Array
    num_layers: Array  # without multi-token prediction modules
    num_dense_layers: Array
    num_moe_layers: Array  # in a hybrid with mixtures all: a layer is the mean of its kinds
    vocab: Array
    head_rows: Array  # the vocabulary, or the scores of a reward model
    num_heads: Array
    num_kv_heads: Array
    qk_dim: Array  # per head
    v_dim: Array  # per head
    is_mla: Array  # 0 or 1
    q_rank: Array
    kv_rank: Array
    rope_dim: Array
    window: Array  # tokens; 0: none
    num_windowed_layers: Array
    full_kv_heads: Array  # of the layers without a window
    full_head_ratio: Array  # width of their heads over that of the others
    query_heads: Array  # of the mean layer, in heads as wide as those of layers with a window
    kv_heads: Array
    projected_kv_heads: Array  # the same; half where one projection makes keys and values
    attention_bias: Array  # of query, key and value projections
    output_bias: Array  # of the output projection
    head_norm_width: Array  # weights of the norms of queries and keys
    norms_all_heads: Array  # 0 or 1: queries and keys are normalised over all heads together
    num_sinks: Array  # of a layer
    output_gate: Array  # 0 or 1: a projection as wide as the queries gates the output
    caps_scores: Array  # 0 or 1: no fused kernel computes them
    num_norms: Array  # of a layer, without those of queries and keys
    parallel_norms: Array  # 0: feed-forward follows attention; else norms of the input that both read
    norms_inputs: Array  # 0 or 1: inputs of attention and feed-forward are normalised
    ffn: Array
    ffn_matrices: Array  # 3 gated, 2 not
    ffn_bias: Array  # of dense layers
    num_experts: Array
    top_k: Array
    expert_ffn: Array
    expert_hidden: Array  # width of what routed experts read and write
    latent: Array  # the same where tokens are projected to it; 0: they are not
    expert_bias: Array
    shared_ffn: Array
    shared_gate: Array  # 0 or 1
    expert_norms: Array  # 0 or 1: experts have norms of their own, and the router scales
    groups_per_token: Array  # 0: routing is not limited to groups
    tied: Array
    head_bias: Array  # 0 or 1
    num_mtp_layers: Array
    num_mtp_modules: Array  # whose weights are there
    mtp_attention_blocks: Array  # of a hybrid's prediction module; others are a layer
    mtp_ffn_blocks: Array
    mtp_moe_blocks: Array
    mtp_state_space_blocks: Array
    learned_positions: Array
    norm_bias: Array
    single_block: Array  # 0 or 1: a hybrid, whose layers hold one block each; a layer is then the mean of all kinds
    attention_share: Array  # of the layers: those with attention; 1 but in hybrids and beside linear attention
    ffn_share: Array  # of those without mixtures, in a hybrid of all
    moe_share: Array  # of those with mixtures, in a hybrid of all
    state_space_share: Array
    state_size: Array  # N of a state-space layer
    state_heads: Array
    state_inner: Array  # width of all of its heads
    state_groups: Array
    state_convolved: Array  # channels of its convolution
    state_kernel: Array
    state_chunk: Array  # tokens
    state_bias: Array
    is_shared: Array  # 0 or 1: AttentionKind.SHARED
    output_rank: Array  # of each of `output_groups`
    output_groups: Array
    index_heads: Array  # 0: no indexer
    index_dim: Array
    index_stride: Array  # tokens of a key that an indexer scores
    index_share: Array  # of the layers: those with an indexer of their own
    index_trained: Array  # 0 or 1
    top_keys: Array  # that an indexer selects
    selected_share: Array  # of the layers: those that attend to selected keys
    pooled_share: Array  # those that attend to all compressed keys
    pooled_stride: Array  # tokens of such a key
    streams: Array  # residual streams
    linear_share: Array  # of the layers: those with linear attention
    linear_per_channel: Array  # 0 or 1: its states decay by channel
    linear_keys: Array  # width of its keys, and of its queries
    linear_values: Array  # width of its values
    linear_heads: Array  # of values
    linear_key_dim: Array  # of a head
    linear_value_dim: Array
    linear_kernel: Array
    linear_chunk: Array  # tokens
    lora_rank: Array  # 0: every parameter is trained
    num_adapters: Array  # of a layer
    adapts_some_layers: Array  # 0 or 1: other layers have no adapters by choice
    lora_column_inputs: Array  # of a layer's adapted matrices whose outputs are split over tensor ranks
    lora_column_outputs: Array
    lora_row_inputs: Array  # of those whose inputs are split
    lora_row_outputs: Array
    lora_dropout: Array  # 0 or 1
    lora_in_base: Array  # 1: the adapters begin with a part of the base (PiSSA, OLoRA)
    adapts_attention: Array  # 0 or 1: query, key or value
    adapts_ffn: Array  # 0 or 1
    dora_outputs: Array  # of a layer's adapted matrices with a magnitude for each row
    dora_weights: Array  # of these matrices
    dora_matrix: Array  # of the largest of them
    saved_embedding: Array  # 0 or 1: it is trained whole beside adapters
    saved_head: Array  # likewise
    quantised_bytes: Array  # of a weight of the layers' frozen matrices in 8 or 4 bits, with scales; 0: they are not
    quantised_matrix: Array  # weights of the largest of them
    num_quantised: Array  # of a layer, without routed experts

    @property
    def blocks(self) -> Array:
        """Blocks of a layer over the two of a transformer's: 1, of a hybrid's layers 1/2."""
        held = self.attention_share + self.state_space_share + self.ffn_share + self.moe_share
        return np.where(np.asarray(self.single_block) > 0, held / 2, 1.0)

    @property
    def block_inputs(self) -> Array:
        """Tensors that the blocks of a layer read: one for each block, or one that both share."""
        return np.where(np.asarray(self.parallel_norms) == 1, 1.0, 2.0)

    @property
    def residual_sums(self) -> Array:
        """Times that a layer adds to the residual stream, which its norms read as often."""
        return np.where(np.asarray(self.parallel_norms) > 0, 1.0, 2.0)

    @property
    def moe_ffn_share(self) -> Array:
        """Dense feed-forward blocks of a layer of the kind that has mixtures; positive in a hybrid's mean layer."""
        return self.ffn_share * self.single_block

    @property
    def saved_parameters(self) -> Array:
        """Parameters of embedding and head that are trained whole beside adapters."""
        return (self.saved_embedding * self.vocab + self.saved_head * (1 - self.tied) * self.head_rows) * self.hidden

    @property
    def trains_head(self) -> Array:
        """1 where the head has a gradient."""
        return np.maximum((self.lora_rank == 0) * 1, self.saved_head)

    @property
    def lora_width(self) -> Array:
        """Inputs and outputs of a layer's adapted matrices."""
        return self.lora_column_inputs + self.lora_column_outputs + self.lora_row_inputs + self.lora_row_outputs


@dataclass(frozen=True, kw_only=True)
class BatchTable(Table):
    """Sequences of one optimizer step."""

    seq_len: Array  # tokens per sequence
    global_batch: Array  # sequences per step
    head_passes: Array = 0  # further forward passes of the head, which losses of single tokens need
    reference_passes: Array = 0  # further forward passes of the model, for a reference


@dataclass(frozen=True, kw_only=True)
class PlanTable(Table):
    """Fields of `specs.plan.Plan` as numbers."""

    tensor: Array
    sequence_parallel: Array  # 0 or 1
    context: Array
    pipeline: Array
    virtual_pipeline: Array
    expert: Array
    expert_tensor: Array
    data_shard: Array
    data_replicate: Array
    sharding: Array  # Sharding
    micro_batch: Array
    schedule: Array  # index into SCHEDULES
    recompute: Array  # index into RECOMPUTES
    recompute_mask: Integers  # bit i: RECOMPUTE_MODULES[i]
    recompute_layers: Array  # layers per pipeline rank with full recomputation; -1: all
    offload_optimizer: Array  # 0 or 1
    first_layers: Array  # on the first pipeline rank; -1: the usual split (`cost.stages`)
    middle_layers: Array  # on the fullest rank between
    last_layers: Array
    data_outermost: Array = 0  # 1: AxisOrder.DATA_OUTERMOST
    stored_mask: Integers = -1  # bit i: activations of STORED_MODULES[i] in 8 bits; -1: as in `PrecisionTable`
    weight_cache: Array = -1  # WeightCache; -1: as in `PrecisionTable`
    loss_chunk: Array = -1  # tokens whose logits are in memory at once; 0: all; -1: as in `PrecisionTable`
    fewest_layers: Array = -1  # of any stage; -1: the usual split

    @property
    def data(self) -> Array:
        return self.data_shard * self.data_replicate

    @property
    def num_devices(self) -> Array:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def expert_data(self) -> Array:
        """Ranks that hold the same experts."""
        return self.num_devices // (self.expert * self.expert_tensor * self.pipeline)

    def recomputes(self, module: str) -> Integers:
        """1 where selective recomputation names `module`."""
        return (self.recompute_mask >> RECOMPUTE_MODULES.index(module)) & 1


@dataclass(frozen=True, kw_only=True)
class PrecisionTable(Table):
    """Fields of `specs.precision.Precision` but its names, and the formats of the run's kernels."""

    weight_bytes: Array
    weight_cache_bytes: Array
    grad_bytes: Array
    master_bytes: Array
    optimizer_state_bytes: Array
    adamw_state_bytes: Array
    update_bytes: Array
    newton_schulz_steps: Array
    gather_bytes: Array
    reduce_bytes: Array
    dispatch_bytes: Array
    linear_input_bytes: Array
    cast_passes: Array
    amax_passes: Array
    stored_ffn_bytes: Array = 0.0  # per activation of the feed-forward kept for backward; 0: as it was computed
    stored_norm_bytes: Array = 0.0  # the same of the norms
    weight_cache: Array = 0  # WeightCache
    frozen_in_16_bits: Array = 0  # 0 or 1: frozen weights stay in 16 bits under narrower recipes
    loss_chunk: Array = -1  # tokens whose logits are in memory at once; 0: all; -1: as the engine chooses
    dequantises_in_parts: Array = 0  # 0 or 1: several kernels, one after the other, make a matrix of 4 bits whole

    @property
    def activation_bytes(self) -> Array:
        """Bytes per element between layers: the format of GEMM inputs, but never narrower than 16 bits."""
        return np.maximum(self.linear_input_bytes, 2.0)


def model_row(model: Model, *, lora: Lora | None = None) -> ModelTable:
    """The numbers of one model."""
    a, x = model.attention, model.experts
    num_moe = model.num_layers if model.layer_pattern and x else model.num_moe_layers
    return ModelTable(
        hidden=model.hidden,
        num_layers=model.num_layers,
        num_dense_layers=model.num_layers - num_moe,
        num_moe_layers=num_moe,
        vocab=model.vocab,
        head_rows=model.head_rows,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        qk_dim=a.head_dim,
        v_dim=a.v_dim,
        is_mla=int(a.kind is AttentionKind.MLA),
        q_rank=a.query_lora_rank,
        kv_rank=a.kv_lora_rank,
        rope_dim=a.rope_head_dim,
        window=a.window,
        num_windowed_layers=model.num_windowed_layers,
        **_heads(model),
        attention_bias=int(a.bias),
        output_bias=int(a.has_output_bias),
        head_norm_width=_head_norm_width(model),
        norms_all_heads=int(a.qk_norm and a.qk_norm_across_heads),
        num_sinks=a.num_heads if a.sinks else 0,
        output_gate=int(a.output_gate),
        caps_scores=int(a.score_cap > 0),
        num_norms=_num_norms(model),
        parallel_norms=model.parallel_norms,
        norms_inputs=int(model.norm_placement is not NormPlacement.AFTER),
        ffn=model.ffn_hidden if model.share_of(BlockKind.FEED_FORWARD) else 0,
        ffn_matrices=3 if model.gated_ffn else 2,
        ffn_bias=int(model.ffn_bias),
        **_experts(x, hidden=model.hidden),
        tied=int(model.tied_embeddings),
        head_bias=int(model.head_bias),
        **_predictions(model),
        learned_positions=model.learned_positions,
        norm_bias=int(model.norm_bias),
        single_block=int(bool(model.layer_pattern)),
        attention_share=model.share_of(BlockKind.ATTENTION) - model.linear_share,
        ffn_share=model.share_of(BlockKind.FEED_FORWARD),
        moe_share=model.share_of(BlockKind.MIXTURE),
        state_space_share=model.share_of(BlockKind.STATE_SPACE),
        **_state_space(model.state_space),
        **_linear_attention(model),
        **_sparse(model),
        **_adapters(model, lora),
    )


def prediction_module(model: ModelTable) -> ModelTable:
    """The model with one of its prediction modules in place of a layer: a hybrid's module has several blocks,
    and DeepSeek-V4's module has a window alone; beside linear attention it has full attention."""
    if np.any(np.asarray(model.is_shared) * model.num_mtp_layers):
        others = np.where(np.asarray(model.is_shared) > 0, 0, 1)
        names = ("index_share", "selected_share", "pooled_share")
        model = replace(model, **{name: others * getattr(model, name) for name in names})
    if np.any(np.asarray(model.linear_share) * model.num_mtp_layers):
        model = replace(
            model, attention_share=model.attention_share + model.linear_share, linear_share=0 * model.linear_share
        )
    if not np.any(np.asarray(model.single_block) * model.num_mtp_layers):
        return model
    is_hybrid = np.asarray(model.single_block) > 0
    blocks = {
        "attention_share": model.mtp_attention_blocks,
        "ffn_share": model.mtp_ffn_blocks,
        "moe_share": model.mtp_moe_blocks,
        "state_space_share": model.mtp_state_space_blocks,
        "num_norms": sum(getattr(model, f"mtp_{name}_blocks") for name in ("attention", "ffn", "moe", "state_space")),
    }
    return replace(model, **{name: np.where(is_hybrid, own, getattr(model, name)) for name, own in blocks.items()})


def _predictions(model: Model) -> dict[str, int]:
    count, pattern = model.num_mtp_layers, model.mtp_pattern
    return {
        "num_mtp_layers": count,
        "num_mtp_modules": min(count, 1) if model.mtp_shared else count,
        "mtp_attention_blocks": pattern.count(BlockKind.ATTENTION),
        "mtp_ffn_blocks": pattern.count(BlockKind.FEED_FORWARD),
        "mtp_moe_blocks": pattern.count(BlockKind.MIXTURE),
        "mtp_state_space_blocks": pattern.count(BlockKind.STATE_SPACE),
    }


def _adapters(model: Model, lora: Lora | None) -> dict[str, float]:
    """Columns of a layer's adapters and of their base, of the mean of all layers where some have none."""
    adapted, rank = sizes_of_adapters(model, lora) if lora else ((), 0.0)
    resized = adapted if lora and lora.use_dora else ()
    saved = lora.modules_to_save if lora else ()
    columns, rows = ([m for m in adapted if m.by_inputs is by_inputs] for by_inputs in (False, True))
    base = quantised_base(model, lora.base_format if lora else BaseFormat.FULL)
    return {
        "lora_rank": rank,
        "adapts_some_layers": int(lora is not None and lora.layers is not None),
        "num_adapters": sum(m.share for m in adapted),
        "lora_column_inputs": sum(m.share * m.inputs for m in columns),
        "lora_column_outputs": sum(m.share * m.outputs for m in columns),
        "lora_row_inputs": sum(m.share * m.inputs for m in rows),
        "lora_row_outputs": sum(m.share * m.outputs for m in rows),
        "lora_dropout": int(lora is not None and lora.dropout > 0),
        "lora_in_base": int(lora is not None and lora.moves_base),
        "adapts_attention": int(any(m.target in ("query", "key", "value", QKV) for m in adapted)),
        "adapts_ffn": int(any(m.target in ("gate", "up", "down") for m in adapted)),
        "dora_outputs": sum(m.share * m.outputs for m in resized),
        "dora_weights": sum(m.share * m.inputs * m.outputs for m in resized),
        "dora_matrix": max((m.inputs * m.outputs for m in resized), default=0),
        "saved_embedding": int("embedding" in saved),
        "saved_head": int("head" in saved or (model.tied_embeddings and "embedding" in saved)),
        "quantised_bytes": base.bytes_per_weight,
        "quantised_matrix": base.largest_matrix,
        "num_quantised": base.num_matrices,
    }


def _heads(model: Model) -> Mapping[str, float]:
    """Columns of heads: layers without a window, and the mean layer where layers with a window have other heads."""
    a, full = model.attention, model.attention.full_layers
    if full is None:
        same = {"full_kv_heads": a.num_kv_heads, "full_head_ratio": 1, "query_heads": a.num_heads}
        return same | {"kv_heads": a.num_kv_heads, "projected_kv_heads": a.num_kv_heads}
    share, ratio = 1 - model.num_windowed_layers / model.num_layers, full.head_dim / a.head_dim
    wide, windowed = ratio * full.num_kv_heads, (1 - share) * a.num_kv_heads
    return {
        "full_kv_heads": full.num_kv_heads,
        "full_head_ratio": ratio,
        "query_heads": a.num_heads * (1 + share * (ratio - 1)),
        "kv_heads": windowed + share * wide,
        "projected_kv_heads": windowed + share * wide / (2 if full.shares_values else 1),
    }


def _experts(x: Experts | None, *, hidden: int) -> dict[str, int]:
    return {
        "num_experts": x.num_experts if x else 0,
        "top_k": x.top_k if x else 0,
        "expert_ffn": x.ffn_hidden if x else 0,
        "expert_hidden": (x.latent if x else 0) or hidden,
        "latent": x.latent if x else 0,
        "expert_bias": int(x.bias) if x else 0,
        "shared_ffn": x.shared_hidden if x else 0,
        "shared_gate": int(x.shared_gate) if x else 0,
        "expert_norms": int(x.own_norms) if x else 0,
        "groups_per_token": x.groups_per_token if x else 0,
    }


def _state_space(m: StateSpace | None) -> dict[str, int]:
    return {
        "state_size": m.state_size if m else 0,
        "state_heads": m.num_heads if m else 0,
        "state_inner": m.inner if m else 0,
        "state_groups": m.num_groups if m else 0,
        "state_convolved": m.convolved if m else 0,
        "state_kernel": m.conv_kernel if m else 0,
        "state_chunk": m.chunk_size if m else 1,
        "state_bias": int(m.bias) if m else 0,
    }


def _sparse(model: Model) -> dict[str, float]:
    """Columns of indexer, compressed keys and residual streams."""
    a, x, c = model.attention, model.attention.indexer, model.attention.compression
    indexed = model.num_layers if c is None else c.num_layers(indexed=True)
    own = indexed if x is None or x.num_layers is None else x.num_layers
    return {
        "is_shared": int(a.kind is AttentionKind.SHARED),
        "output_rank": a.output_lora_rank,
        "output_groups": a.output_groups,
        "index_heads": x.num_heads if x else 0,
        "index_dim": x.head_dim if x else 0,
        "index_stride": c.indexed_stride if c else 1,
        "index_share": own / model.num_layers if x else 0,
        "index_trained": int(x is not None and x.is_trained),
        "top_keys": x.top_k if x else 0,
        "selected_share": indexed / model.num_layers if x else 0,
        "pooled_share": c.num_layers(indexed=False) / model.num_layers if c else 0,
        "pooled_stride": c.long_stride if c else 1,
        "streams": model.residual_streams,
    }


def _linear_attention(model: Model) -> dict[str, float]:
    m = model.linear_attention
    return {
        "linear_share": model.linear_share,
        "linear_per_channel": int(m is not None and m.kind is LinearKind.KDA),
        "linear_keys": m.keys if m else 0,
        "linear_values": m.values if m else 0,
        "linear_heads": m.num_value_heads if m else 0,
        "linear_key_dim": m.key_head_dim if m else 0,
        "linear_value_dim": m.value_head_dim if m else 0,
        "linear_kernel": m.conv_kernel if m else 0,
        "linear_chunk": m.chunk_size if m else 1,
    }


def _num_norms(model: Model) -> int:
    if model.layer_pattern:
        return 1
    around = model.parallel_norms or (4 if model.norm_placement is NormPlacement.BOTH else 2)
    return around + 3 * (model.experts is not None and model.experts.own_norms)


def _head_norm_width(model: Model) -> float:
    a = model.attention
    if not a.qk_norm:
        return 0
    if a.qk_norm_across_heads:
        return a.head_dim * (a.num_heads + a.num_kv_heads)
    return 2 * a.head_dim * _heads(model)["query_heads"] / a.num_heads


def plan_row(plan: Plan) -> PlanTable:
    """The numbers of one plan."""
    layers = plan.layers_per_stage
    first, middle, last = (-1, -1, -1) if layers is None else rank_layers(shape_of(plan), layers)
    return PlanTable(
        tensor=plan.tensor,
        sequence_parallel=int(plan.sequence_parallel),
        context=plan.context,
        pipeline=plan.pipeline,
        virtual_pipeline=plan.virtual_pipeline,
        expert=plan.expert,
        expert_tensor=plan.expert_tensor,
        data_shard=plan.data_shard,
        data_replicate=plan.data_replicate,
        sharding=int(plan.sharding),
        micro_batch=plan.micro_batch,
        schedule=SCHEDULES.index(plan.schedule),
        recompute=RECOMPUTES.index(plan.recompute),
        recompute_mask=sum(1 << RECOMPUTE_MODULES.index(m) for m in plan.recompute_modules),
        recompute_layers=-1 if plan.recompute_layers is None else plan.recompute_layers,
        offload_optimizer=int(plan.offload is Offload.OPTIMIZER),
        first_layers=first,
        middle_layers=middle,
        last_layers=last,
        data_outermost=int(plan.axis_order is AxisOrder.DATA_OUTERMOST),
        stored_mask=stored_column(plan.stored_activations),
        weight_cache=cache_column(plan.weight_cache),
        loss_chunk=chunk_column(plan.loss_chunk),
        fewest_layers=-1 if layers is None else min(layers),
    )


def stored_column(modules: Collection[str] | None) -> int:
    """`Plan.stored_activations` as `PlanTable.stored_mask` has it."""
    return -1 if modules is None else sum(1 << STORED_MODULES.index(m) for m in modules)


def cache_column(name: str | None) -> int:
    """`Plan.weight_cache` as the table has it."""
    return -1 if name is None else int(WeightCache[name.upper()])


def chunk_column(tokens: int | str | None) -> int:
    """`Plan.loss_chunk` as the table has it.

    >>> [chunk_column(tokens) for tokens in (None, "auto", "all", 512)]
    [-1, -1, 0, 512]
    """
    special = 0 if tokens == ALL_TOKENS else -1
    return tokens if isinstance(tokens, int) else special


def precision_row(
    precision: Precision,
    *,
    stored_activations: Mapping[str, str] | None = None,
    weight_cache: int = 0,
    frozen_in_16_bits: Array = 0,
    loss_chunk: int | str = "auto",
    dequantises_in_parts: int = 0,
) -> PrecisionTable:
    """The byte counts of one recipe. `stored_activations`: modules that keep them in 8 bits. `weight_cache`:
    whether quantised weights are kept (`cost.casts.WeightCache`). `frozen_in_16_bits`: the stack's
    (`MemoryConstants`). `loss_chunk`: as the run file has it. `dequantises_in_parts`: the native engine's."""
    stored, of_recipe = stored_activations or {}, {f.name for f in fields(Precision)}
    return PrecisionTable(
        **{f.name: getattr(precision, f.name) for f in fields(PrecisionTable) if f.name in of_recipe},
        stored_ffn_bytes=STORED_BYTES if "feed_forward" in stored else 0.0,
        stored_norm_bytes=STORED_BYTES if "norm" in stored else 0.0,
        weight_cache=weight_cache,
        frozen_in_16_bits=frozen_in_16_bits,
        loss_chunk=chunk_column(loss_chunk),
        dequantises_in_parts=dequantises_in_parts,
    )


def as_planned(precision: PrecisionTable, plan: PlanTable) -> PrecisionTable:
    """`precision` with the formats that plans themselves state."""
    changes: dict[str, Array] = {}
    mask, cache, chunk = map(np.asarray, (plan.stored_mask, plan.weight_cache, plan.loss_chunk))
    if np.any(mask >= 0):
        for i, name in enumerate(("stored_ffn_bytes", "stored_norm_bytes")):
            changes[name] = np.where(mask < 0, getattr(precision, name), STORED_BYTES * (mask >> i & 1))
    if np.any(cache >= 0):
        changes["weight_cache"] = np.where(cache < 0, precision.weight_cache, cache)
    if np.any(chunk >= 0):
        changes["loss_chunk"] = np.where(chunk < 0, precision.loss_chunk, chunk)
    return replace(precision, **changes) if changes else precision
