"""Structs of arrays: the cost model is written once, for one plan and for a million.

Every formula in `cost` is plain arithmetic on the fields of these tables. A field is a number or a NumPy array;
arrays broadcast. To cost one plan all fields are numbers; to screen a search the plan's fields are arrays and the
model's are numbers; to calibrate, one row is one published run and every field is an array.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshwright.arrays import Array, Integers, Table
from meshwright.specs.model import Attention, AttentionKind, Lora, Model, NormPlacement
from meshwright.specs.plan import RECOMPUTE_MODULES, Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import Precision

SCHEDULES = tuple(Schedule)
"""A plan table stores the index into this tuple."""

RECOMPUTES = tuple(Recompute)


@dataclass(frozen=True, kw_only=True)
class ModelTable(Table):
    """Shapes of a model (see `specs.model` for symbols)."""

    hidden: Array
    num_layers: Array  # without multi-token prediction modules
    num_dense_layers: Array
    num_moe_layers: Array
    vocab: Array
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
    attention_bias: Array  # of query, key and value projections
    output_bias: Array  # of the output projection
    head_norm_width: Array  # weights of the norms of queries and keys
    norms_all_heads: Array  # 0 or 1: queries and keys are normalised over all heads together
    num_sinks: Array  # of a layer
    caps_scores: Array  # 0 or 1: no fused kernel computes them
    num_norms: Array  # of a layer, without those of queries and keys
    norms_inputs: Array  # 0 or 1: inputs of attention and feed-forward are normalised
    ffn: Array
    ffn_matrices: Array  # 3 gated, 2 not
    num_experts: Array
    top_k: Array
    expert_ffn: Array
    expert_bias: Array
    shared_ffn: Array
    groups_per_token: Array  # 0: routing is not limited to groups
    tied: Array
    num_mtp_layers: Array
    learned_positions: Array
    norm_bias: Array
    lora_rank: Array  # 0: every parameter is trained
    lora_width: Array  # per layer, sum over adapted matrices of (inputs + outputs)


@dataclass(frozen=True, kw_only=True)
class BatchTable(Table):
    """Sequences of one optimizer step."""

    seq_len: Array  # tokens per sequence
    global_batch: Array  # sequences per step


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
    """Fields of `specs.precision.Precision` but its names."""

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

    @property
    def activation_bytes(self) -> Array:
        """Bytes per element between layers: the format of GEMM inputs, but never narrower than 16 bits."""
        return np.maximum(self.linear_input_bytes, 2.0)


def model_row(model: Model, *, lora: Lora | None = None) -> ModelTable:
    """The numbers of one model."""
    a, x = model.attention, model.experts
    return ModelTable(
        hidden=model.hidden,
        num_layers=model.num_layers,
        num_dense_layers=model.num_dense_layers,
        num_moe_layers=model.num_moe_layers,
        vocab=model.vocab,
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
        attention_bias=int(a.bias),
        output_bias=int(a.has_output_bias),
        head_norm_width=_head_norm_width(a),
        norms_all_heads=int(a.qk_norm and a.qk_norm_across_heads),
        num_sinks=a.num_heads if a.sinks else 0,
        caps_scores=int(a.score_cap > 0),
        num_norms=4 if model.norm_placement is NormPlacement.BOTH else 2,
        norms_inputs=int(model.norm_placement is not NormPlacement.AFTER),
        ffn=model.ffn_hidden,
        ffn_matrices=3 if model.gated_ffn else 2,
        num_experts=x.num_experts if x else 0,
        top_k=x.top_k if x else 0,
        expert_ffn=x.ffn_hidden if x else 0,
        expert_bias=int(x.bias) if x else 0,
        shared_ffn=x.shared_hidden if x else 0,
        groups_per_token=x.groups_per_token if x else 0,
        tied=int(model.tied_embeddings),
        num_mtp_layers=model.num_mtp_layers,
        learned_positions=model.learned_positions,
        norm_bias=int(model.norm_bias),
        lora_rank=lora.rank if lora else 0,
        lora_width=_lora_width(model, lora) if lora else 0,
    )


def _head_norm_width(a: Attention) -> int:
    if not a.qk_norm:
        return 0
    return a.head_dim * (a.num_heads + a.num_kv_heads if a.qk_norm_across_heads else 2)


def _lora_width(model: Model, lora: Lora) -> int:
    a, h, f = model.attention, model.hidden, model.ffn_hidden
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    width = {
        "query": h + q,
        "key": h + kv,
        "value": h + a.num_kv_heads * a.v_dim,
        "output": a.num_heads * a.v_dim + h,
        "gate": h + f,
        "up": h + f,
        "down": f + h,
    }
    return sum(width[target] for target in lora.targets)


def plan_row(plan: Plan) -> PlanTable:
    """The numbers of one plan."""
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
    )


def plan_from_row(row: PlanTable) -> Plan:
    """The inverse of `plan_row` for a table of one row."""
    mask = int(row.recompute_mask)
    return Plan(
        tensor=int(row.tensor),
        sequence_parallel=bool(row.sequence_parallel),
        context=int(row.context),
        pipeline=int(row.pipeline),
        virtual_pipeline=int(row.virtual_pipeline),
        expert=int(row.expert),
        expert_tensor=int(row.expert_tensor),
        data_shard=int(row.data_shard),
        data_replicate=int(row.data_replicate),
        sharding=Sharding(int(row.sharding)),
        micro_batch=int(row.micro_batch),
        schedule=SCHEDULES[int(row.schedule)],
        recompute=RECOMPUTES[int(row.recompute)],
        recompute_modules=tuple(m for i, m in enumerate(RECOMPUTE_MODULES) if mask >> i & 1),
        recompute_layers=None if int(row.recompute_layers) < 0 else int(row.recompute_layers),
        offload=Offload.OPTIMIZER if row.offload_optimizer else Offload.NONE,
    )


def precision_row(precision: Precision) -> PrecisionTable:
    """The byte counts of one recipe."""
    return PrecisionTable(**{f.name: getattr(precision, f.name) for f in fields(PrecisionTable)})
