"""Facts about Meshwright's own engine for the planner: its schedules, recomputation and rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, Integers, Mask
from meshwright.cost.pipeline.schedules import schedules_with
from meshwright.cost.tables import RECOMPUTES, PlanTable, stored_column
from meshwright.planner.engines import AnyValue, EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import fills_stages, has_experts, has_schedule, mask_of, module_names
from meshwright.specs.plan import DROPPED_MODULES, SCHEDULES, STORED_MODULES, WEIGHT_CACHES, Recompute, Sharding

STORED_OR_RECOMPUTED = {
    "feed_forward": ("mlp", "moe", "shared_experts", "activation", "alternate_matmuls"),
    "norm": ("norm", "alternate_matmuls"),
}
"""Modules whose recomputation leaves nothing to store in 8 bits, by those of `kernels.stored_activations`."""

OFFLOADED = "stack.offloaded_activations"

WITHOUT_CHECKPOINT = ("norm", "activation", "mla_up_projection")
"""Modules whose outputs are freed while others keep them: recomputed without a checkpoint around them."""

NARROW_UNITS = {"fp8": 16, "fp8_delayed": 16, "fp8_rowwise": 16, "fp8_blockwise": 16, "mxfp8": 32, "mxfp4": 32}
"""Widths of GEMMs in 8 and 4 bits are multiples of this: a condition of the matrix units, and of MX's groups."""


def _recomputed(plan: PlanTable, *modules: str) -> NDArray[np.bool_]:
    return (np.asarray(plan.recompute_mask) & mask_of(*modules)) != 0


def _is(kind: Recompute, plan: PlanTable) -> NDArray[np.bool_]:
    return np.equal(plan.recompute, RECOMPUTES.index(kind))


def _stored(s: LegalityContext, plan: PlanTable) -> Integers:
    """Modules whose activations are in 8 bits, as `PlanTable.stored_mask` has them."""
    return np.where(np.asarray(plan.stored_mask) < 0, stored_column(s.stored), plan.stored_mask)


def _stored_once(module: str) -> Rule:
    """Nothing is both stored in 8 bits and recomputed."""
    bit = 1 << STORED_MODULES.index(module)
    return Rule(
        name=f"stored activations of {module}",
        holds=lambda s, p: ((_stored(s, p) & bit) == 0) | ~_recomputed(p, *STORED_OR_RECOMPUTED[module]),
        says=lambda _, p: f"it is recomputed already ({module_names(int(p.recompute_mask))}): leave out one of both",
        key=f"kernels.stored_activations.{module}",
    )


def _is_whole(plan: PlanTable) -> Mask:
    """True if a rank has all layers, and all tokens of its sequences."""
    return (np.asarray(plan.pipeline) == 1) & (np.asarray(plan.context) == 1)


def _splits_backward(plan: PlanTable) -> NDArray[np.bool_]:
    return has_schedule(plan, *schedules_with(lambda r: r.splits_backward)) & (np.asarray(plan.pipeline) > 1)


def _odd_widths(s: LegalityContext, plan: PlanTable) -> list[tuple[str, Array, Mask]]:
    """Widths of the GEMMs of one rank: what, how many, and where the run's format does not allow so many."""
    unit = NARROW_UNITS.get(s.precision)
    if unit is None:
        return []
    m, ranks = s.model, plan.tensor
    widths: dict[str, Array] = {
        "tokens of a micro-batch and rank": plan.micro_batch * s.batch.seq_len // plan.context,
        "hidden widths": m.hidden,
        "query widths": m.num_heads * m.qk_dim // ranks,
        "value widths": m.num_heads * m.v_dim // ranks,
    }
    if m.is_mla:
        widths |= {"query latents": m.q_rank, "key and value latents": m.kv_rank}
        widths["latents with the rotary key"] = m.kv_rank + m.rope_dim
        widths["key and value widths"] = m.num_heads * (m.qk_dim - m.rope_dim + m.v_dim)
    else:
        widths["key widths"] = m.num_kv_heads * m.qk_dim // ranks
        widths["value widths of a group"] = m.num_kv_heads * m.v_dim // ranks
    if m.num_dense_layers:
        widths["feed-forward columns"] = m.ffn // ranks
    if has_experts(s):
        widths["columns of shared experts"] = m.shared_ffn // ranks
        widths["columns of routed experts"] = m.expert_ffn // plan.expert_tensor
    return [(what, count, np.asarray(count) % unit != 0) for what, count in widths.items()]


def _says_widths(s: LegalityContext, plan: PlanTable) -> str:
    counts = [f"{int(count)} {what}" for what, count, is_odd in _odd_widths(s, plan) if is_odd]
    return f"{s.precision} needs multiples of {NARROW_UNITS[s.precision]}, a rank has {', '.join(counts)}"


def _keeps_cached(s: LegalityContext, plan: PlanTable) -> Mask:
    """A cache that the run asks for has 8-bit weights, which stay whole between micro-batches."""
    whole = (plan.sharding != Sharding.PARAMETERS) | (plan.pipeline > 1) | (plan.data_shard == 1)
    return (not s.caches_weights) | (s.narrow_weights & whole) | (np.asarray(plan.weight_cache) >= 0)


def _keeps_all(s: LegalityContext) -> NDArray[np.bool_]:
    """True if no activations are kept in host memory."""
    return np.asarray(not s.software.offloaded_activations)


RULES = (
    Rule(
        name="context of prediction modules",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.num_mtp_layers == 0) | (np.asarray(p.context) == 1),
        says=lambda s, p: (
            f"multi-token prediction reads the next tokens, which are on other context ranks: context {p.context} "
            "must be 1"
        ),
        key="parallel.context",
        hint="--set model.num_mtp_layers=0",
    ),
    Rule(
        name="stored activations",
        holds=lambda s, p: (_stored(s, p) == 0) | ~_is(Recompute.FULL, p),
        says="whole layers are recomputed and save nothing: leave it out",
        key="kernels.stored_activations",
    ),
    *(_stored_once(module) for module in STORED_MODULES),
    Rule(
        name="expert tensor width",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.expert_tensor == p.tensor) | (p.expert_tensor == 1),
        says=lambda s, p: f"expert_tensor {p.expert_tensor} is neither 1 nor tensor {p.tensor}",
        after="expert folding",
    ),
    Rule(
        name="recomputation under zero bubble",
        holds=lambda _, p: (
            ~_splits_backward(p)
            | (~_is(Recompute.FULL, p) & ((np.asarray(p.recompute_mask) & ~mask_of(*DROPPED_MODULES)) == 0))
        ),
        says=lambda _, p: (
            f"{SCHEDULES[int(p.schedule)].value} would compute it twice, for gradients of inputs and of weights"
        ),
        key="parallel.recompute",
        hint=f"allowed with it: none, or modules of {', '.join(DROPPED_MODULES)}",
    ),
    Rule(
        name="recomputed norms",
        holds=lambda _, p: (p.tensor == 1) | ~_recomputed(p, "norm"),
        says=lambda _, p: f"norm frees nothing when tensor > 1, here {p.tensor}: the gathered output is kept",
        key="parallel.recompute",
    ),
    Rule(
        name="norms of outputs",
        holds=lambda s, p: (s.model.norms_inputs > 0) | ~_recomputed(p, "norm"),
        says="the model has no norm whose output is kept: it normalises only outputs of attention and feed-forward",
        key="parallel.recompute",
    ),
    Rule(
        name="norms over all heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.norms_all_heads == 0) | (p.tensor == 1),
        says=lambda _, p: f"queries and keys are normalised over all heads, which tensor {p.tensor} would divide",
        key="parallel.tensor",
    ),
    Rule(
        name="biased experts",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.expert_bias == 0) | (p.expert_tensor == 1),
        says=lambda _, p: f"each of expert_tensor {p.expert_tensor} ranks would add the biases of an expert's output",
        key="parallel.expert_tensor",
    ),
    Rule(
        name="alternate GEMMs",
        holds=lambda s, p: (
            ~_recomputed(p, "alternate_matmuls")
            | (
                (np.asarray(p.recompute_mask) == mask_of("alternate_matmuls"))
                & ((p.expert * p.expert_tensor * p.tensor == 1) | (not has_experts(s)))
            )
        ),
        # Sharded experts are gathered inside their layer, which a recomputed layer does not do twice.
        says="alternate_matmuls decides for all modules, so that it cannot be combined with others, and needs whole "
        "experts: expert, expert_tensor and tensor must be 1",
        key="parallel.recompute",
    ),
    Rule(
        name="filled stages of adapters",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.lora_rank == 0) | fills_stages(s, p),
        says="a stage without layers has no adapters to train",
        key="parallel.layers_per_stage",
        after="layers",
    ),
    Rule(
        name="adapters of chosen layers",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.adapts_some_layers == 0) | (np.asarray(p.pipeline) == 1),
        says="a stage whose layers have no adapters (lora.layers) has no gradient: must be 1",
        key="parallel.pipeline",
    ),
    Rule(
        name="quantised base of tensor ranks",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.quantised_bytes == 0) | (np.asarray(p.tensor) == 1),
        says="a quantised base is not sharded: must be 1",
        key="parallel.tensor",
    ),
    Rule(
        name="quantised base of shards",
        holds=lambda s, p: (
            (s.model.quantised_bytes == 0)
            | (np.asarray(p.sharding) != Sharding.PARAMETERS)
            | (np.asarray(p.data_shard * p.context) == 1)
        ),
        says="a quantised base is not sharded",
        key="parallel.sharding",
        hint="allowed: none, optimizer, gradients",
    ),
    Rule(
        name="dropout of latents",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.lora_dropout * s.model.is_mla == 0) | (p.tensor == 1),
        says="tensor ranks would drop different latents: must be 0",
        key="lora.dropout",
    ),
    Rule(
        name="recomputed dropout",
        holds=lambda s, p: (s.model.lora_dropout == 0) | ~_recomputed(p, "mla_up_projection"),
        says="mla_up_projection would draw another dropout when recomputed: must be 0",
        key="lora.dropout",
    ),
    Rule(
        name="dropout of attention",
        holds=lambda s, p: (not s.drops_attention) | ((p.tensor == 1) & ~_recomputed(p, "alternate_matmuls")),
        says="tensor ranks would drop the same keys of their heads, and alternate_matmuls would draw other numbers "
        "behind attention that it saves: must be 0",
        key="train.attention_dropout",
    ),
    Rule(
        name="steps of labels",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not s.counts_labels) | (np.asarray(p.pipeline) == 1),
        says="a pipeline's schedule needs as many micro-batches in each step: parallel.pipeline must be 1",
        key="batch.label_tokens",
    ),
    Rule(
        name="pairs of answers",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not s.has_pairs) | _is_whole(p),
        says="the loss of a pair needs both answers on one rank: parallel.pipeline and parallel.context must be 1",
        key="train.preference",
    ),
    Rule(
        name="completions",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not s.has_completions) | _is_whole(p),
        says="a process writes and scores whole completions: parallel.pipeline and parallel.context must be 1",
        key="train.grpo",
    ),
    Rule(
        name="compiled backward pass",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not s.is_compiled) | ~_splits_backward(p),
        says=lambda _, p: (
            f"the backward pass of a compiled layer is one piece, which {SCHEDULES[int(p.schedule)].value} would split"
        ),
        key="train.compile",
        hint="allowed with it: gpipe, 1f1b, interleaved",
    ),
    Rule(
        name="compiled recomputation",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (not s.is_compiled) | ~_is(Recompute.SELECTIVE, p),
        says="the compiler itself decides which norms and activations of a layer are recomputed",
        key="train.compile",
        hint="set parallel.recompute to none or full",
    ),
    Rule(
        name="compiled storage",
        holds=lambda s, p: (not s.is_compiled) | (_stored(s, p) == 0),
        says="a compiled layer saves what the compiler decides: leave it out",
        key="kernels.stored_activations",
        hint="--set train.compile=false",
    ),
    Rule(
        name="narrow widths",
        scope=Scope.BATCH,
        holds=lambda s, p: ~np.any(np.broadcast_arrays(False, *(odd for *_, odd in _odd_widths(s, p))), axis=0),
        says=_says_widths,
        key="precision",
        hint="precision: bf16",
    ),
    Rule(
        name="cached weights",
        holds=_keeps_cached,
        says=lambda s, _: (
            "weights are gathered again for each pass of a layer: there is nothing to keep"
            if s.narrow_weights
            else f"{s.precision} has no 8-bit weights: leave it out"
        ),
        key="kernels.weight_cache",
        hint=lambda s, _: "parallel.sharding: optimizer" if s.narrow_weights else None,
    ),
    Rule(
        name="offloaded activations",
        scope=Scope.SHAPE,
        holds=lambda s, p: _keeps_all(s) | (np.asarray(p.pipeline) == 1),
        says="layers of a pipeline keep their activations on the device: must be 0, or pipeline 1",
        key=OFFLOADED,
    ),
    Rule(
        name="offloaded and recomputed activations",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (
            _keeps_all(s)
            | ((np.asarray(p.recompute_layers) < 0) & ~_recomputed(p, *WITHOUT_CHECKPOINT, "alternate_matmuls"))
        ),
        says="is combined with recomputation of all layers, or of modules of which inputs are kept: "
        f"not of some layers, {', '.join(WITHOUT_CHECKPOINT)} or alternate_matmuls",
        key=OFFLOADED,
        hint="set parallel.recompute to none or full",
    ),
    Rule(
        name="compiled offloading",
        scope=Scope.SHAPE,
        holds=lambda s, _: _keeps_all(s) | np.asarray(not s.is_compiled),
        says="a compiled layer keeps what the compiler decides: must be 0",
        key=OFFLOADED,
        hint="--set train.compile=false",
    ),
    Rule(
        name="offloaded states",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (np.asarray(p.offload_optimizer) == 0) | (s.optimizer.name == "adamw"),
        says=lambda s, _: f"states of {s.optimizer.name} stay on the device: must be none",
        key="parallel.offload",
        hint="optimizer {name: adamw} has states in host memory",
    ),
    Rule(
        name="blocks of split matrices",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.optimizer.name != "adamw8bit") | (p.tensor * p.expert * p.expert_tensor == 1),
        says="adamw8bit rounds in blocks of whole tensors, and this plan shards matrices or experts",
        key="optimizer.name",
        hint="optimizer {name: adamw, states: int8} runs under every plan",
    ),
    Rule(
        name="blocks of sharded states",
        holds=lambda s, p: (
            (s.optimizer.name != "adamw8bit") | (p.sharding == Sharding.NONE) | (p.data_shard * p.context == 1)
        ),
        says="adamw8bit rounds in blocks of whole tensors, which this plan shards",
        key="optimizer.name",
        hint="optimizer {name: adamw, states: int8} runs under every plan; or parallel.sharding: none",
    ),
)

NOT_TRIED = ("expert tensor width",)
"""Rules for the search alone: the engine runs these plans."""

FACTS = EngineFacts(
    title="native",
    stack="native",
    vendors=("NVIDIA", "AMD", "generic"),
    vendors_source="meshwright.training.device, find_device: a GPU that PyTorch calls cuda, or the CPU",
    precisions=("fp32", "bf16", *NARROW_UNITS),
    # DualPipe holds every stage on two ranks and runs passes of two micro-batches at once, which the runtime under it
    # does not know.
    schedules=schedules_with(lambda record: not record.overlaps_pairs),
    shardings=tuple(Sharding),
    recomputes=tuple(Recompute),
    selective=None,
    partial_full=True,
    dense_activation=True,
    uneven_layers=True,
    short_interleaving=True,
    narrow_states=True,
    offloads_optimizer=True,
    switches=(("offloaded_activations", AnyValue()),),
    stored_modules=STORED_MODULES,
    weight_caches=WEIGHT_CACHES,
    loss="logits of a chunk of tokens at once, which their gradient overwrites",
    loss_chunks=True,
    rules=RULES,
    source="Meshwright's own engine",
)
