"""The legality rules that engines share, as predicates over tables and sentences with numbers.

What tells engines apart is a fact of theirs (`EngineFacts`); a rule that one engine alone has stands in its `facts`,
made of the same words.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, Mask
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, chunks_allowed, column_of
from meshwright.cost.tables import RECOMPUTES, ModelTable, PlanTable, WeightCache
from meshwright.planner.engines import EngineFacts, LegalityContext, Rule, Scope, Severity, sets_for
from meshwright.specs.plan import RECOMPUTE_MODULES, SCHEDULES, AxisOrder, Recompute, Schedule, Sharding


def is_divisor(part: Array, whole: Array) -> NDArray[np.bool_]:
    """True where `whole` is a multiple of `part`."""
    return np.asarray(whole) % np.maximum(part, 1) == 0


def num_micro_batches(context: LegalityContext, plan: PlanTable) -> Array:
    """Micro-batches per step, rounded down; 0 where the global batch is too small."""
    return context.batch.global_batch // np.maximum(plan.micro_batch * plan.data, 1)


def has_schedule(plan: PlanTable, *schedules: Schedule) -> NDArray[np.bool_]:
    """True where the plan's schedule is one of `schedules`."""
    return np.isin(plan.schedule, [SCHEDULES.index(s) for s in schedules])


def linear_key_heads(model: ModelTable) -> Array:
    """Key heads of linear attention."""
    return model.linear_keys // np.maximum(model.linear_key_dim, 1)


def has_experts(context: LegalityContext) -> bool:
    """True if the model is a mixture of experts."""
    return bool(context.model.num_experts > 0)


def _splits_heads(s: LegalityContext, plan: PlanTable, num_kv_heads: Array) -> Mask:
    """Tensor ranks hold whole key/value heads, or several hold the same one."""
    repeats = is_divisor(num_kv_heads, plan.tensor) & s.facts.repeats_kv_heads
    return is_divisor(plan.tensor, num_kv_heads) | repeats


def _says_kv_heads(s: LegalityContext, p: PlanTable) -> str:
    windowed = bool(np.all(_splits_heads(s, p, s.model.num_kv_heads)))
    heads = s.model.full_kv_heads if windowed else s.model.num_kv_heads
    verb = "neither divides nor repeats" if s.facts.repeats_kv_heads else "does not divide"
    return f"tensor {p.tensor} {verb} {heads} key/value heads"


def _states_fit_context(s: LegalityContext, plan: PlanTable) -> Mask:
    """Context ranks split the heads of state-space layers; groups are split too, or repeated."""
    ranks, groups = plan.tensor * plan.context, s.model.state_groups // np.maximum(plan.tensor, 1)
    whole = is_divisor(plan.context, groups) | is_divisor(groups, plan.context)
    return (plan.context == 1) | (s.model.state_space_share == 0) | (is_divisor(ranks, s.model.state_heads) & whole)


def _rule_fits_context(s: LegalityContext, plan: PlanTable) -> Mask:
    """Context ranks split the heads of Gated DeltaNet; no program that is known splits Kimi Delta Attention's."""
    m, ranks = s.model, plan.tensor * plan.context
    split = is_divisor(ranks, linear_key_heads(m)) & is_divisor(ranks, m.linear_heads)
    return (plan.context == 1) | (m.linear_share == 0) | (split & (m.linear_per_channel == 0))


def _says_rule_context(s: LegalityContext, p: PlanTable) -> str:
    if s.model.linear_per_channel:
        return f"context {p.context}: Kimi Delta Attention over context ranks is not estimated"
    return (
        f"tensor {p.tensor} x context {p.context} does not divide the {linear_key_heads(s.model)} key and "
        f"{s.model.linear_heads} value heads of linear attention, which context ranks hold parts of"
    )


def fills_stages(s: LegalityContext, plan: PlanTable) -> Mask:
    """True where every stage has a layer."""
    stages = plan.pipeline * plan.virtual_pipeline
    ends = s.model.num_layers - (stages - 2) * -(-s.model.num_layers // np.maximum(stages, 1))
    usual = (stages == 1) | np.where(ends < 0, stages <= s.model.num_layers, ends >= 2)
    return np.where(np.asarray(plan.fewest_layers) < 0, usual, np.asarray(plan.fewest_layers) > 0)


def _layers_fit(s: LegalityContext, plan: PlanTable) -> Mask:
    """Middle stages take ceil(L / S) layers; the first and the last take the rest, which must not be negative.

    A plan that names its layers needs an engine that takes any.
    """
    num_layers, stages = s.model.num_layers, plan.pipeline * plan.virtual_pipeline
    named = np.asarray(plan.first_layers) >= 0
    if not s.facts.uneven_layers:
        return is_divisor(stages, num_layers) & ~named
    middle = -(-num_layers // np.maximum(stages, 1))
    return named | ((num_layers - (stages - 2) * middle >= 0) & (stages <= num_layers + 2))


def _says_layers(s: LegalityContext, p: PlanTable) -> str:
    if p.first_layers >= 0:
        return f"{s.facts.title} splits layers evenly: leave layers_per_stage out"
    stages = p.pipeline * p.virtual_pipeline
    shared = " even if the first and the last hold fewer" if s.facts.uneven_layers else ""
    return (
        f"{s.model.num_layers} layers do not lie on pipeline {p.pipeline} x virtual {p.virtual_pipeline}"
        f" = {stages} stages{shared}"
    )


def _chunks_fit(_: LegalityContext, plan: PlanTable) -> Mask:
    return np.where(
        plan.pipeline == 1, plan.virtual_pipeline == 1, chunks_allowed(plan.virtual_pipeline, plan.schedule)
    )


def _says_chunks(_: LegalityContext, p: PlanTable) -> str:
    if p.pipeline == 1:
        return f"virtual_pipeline {p.virtual_pipeline} needs a pipeline of 2 ranks or more, there is 1"
    schedule = SCHEDULES[int(p.schedule)]
    needed = SCHEDULE_RECORDS[schedule].chunks_allowed
    return f"{schedule.value} needs {needed} virtual stages per rank, there are {p.virtual_pipeline}"


def _selective_offered(s: LegalityContext, plan: PlanTable) -> Mask:
    other = np.not_equal(plan.recompute, RECOMPUTES.index(Recompute.SELECTIVE))
    if s.facts.selective is None:
        return other | (plan.recompute_mask > 0)
    offered = sets_for(s.facts.selective, is_moe=has_experts(s))
    masks = [mask_of(*modules) for modules in offered]
    return other | np.isin(plan.recompute_mask, masks)


def mask_of(*modules: str) -> int:
    """`modules` as a plan table's `recompute_mask` has them."""
    return sum(1 << RECOMPUTE_MODULES.index(m) for m in modules)


def module_names(mask: int) -> str:
    """The modules of a `recompute_mask` in words."""
    return ", ".join(m for i, m in enumerate(RECOMPUTE_MODULES) if mask >> i & 1) or "nothing"


def _modules_exist(s: LegalityContext, plan: PlanTable) -> Mask:
    """Modules that the model has; not all engines recompute activations apart outside of experts."""
    absent = [] if has_experts(s) else ["moe"]
    absent += ["mlp"] if has_experts(s) and not (s.model.num_dense_layers or s.model.single_block) else []
    absent += [] if s.model.is_mla else ["mla_up_projection"]
    absent += [] if s.model.shared_ffn else ["shared_experts"]
    absent += [] if s.facts.dense_activation or has_experts(s) else ["activation"]
    return (np.asarray(plan.recompute_mask) & mask_of(*absent)) == 0


def _cache_offered(s: LegalityContext, plan: PlanTable) -> Mask:
    """A stated cache needs an engine that has one and 8-bit weights, which stay whole between micro-batches."""
    said = np.asarray(plan.weight_cache)
    whole = (plan.sharding != Sharding.PARAMETERS) | (plan.pipeline > 1) | (plan.data_shard == 1)
    offered = bool(s.facts.weight_caches) and s.narrow_weights
    return (said < 0) | (offered & (whole | (said == WeightCache.OFF)))


def _says_cache(s: LegalityContext, _: PlanTable) -> str:
    if not s.facts.weight_caches:
        return f"{s.facts.title} has no choice of a weight cache"
    if not s.narrow_weights:
        return "a weight cache is of 8-bit weights, which this precision does not have"
    return "with sharded parameters weights are gathered again for each pass: there is nothing to cache"


def loss_chunk(s: LegalityContext, plan: PlanTable) -> Array:
    """Tokens of a chunk of the loss as the plan or the run asks; 0 or less: all."""
    return np.where(np.asarray(plan.loss_chunk) < 0, s.loss_chunk, plan.loss_chunk)


def _says_loss(s: LegalityContext, _: PlanTable) -> str:
    return f"{s.facts.title} has no choice of a chunk of the loss: {s.facts.loss}"


def _sequence_unit(s: LegalityContext, plan: PlanTable) -> Array:
    """The sequence must be a multiple of this: two slices per context rank, each split over tensor ranks."""
    context = np.where(plan.context > 1, 2 * plan.context, 1)
    block = np.where(plan.context > 1, s.facts.context_block * plan.context, 1)
    return np.lcm(context * np.where(plan.sequence_parallel > 0, plan.tensor, 1), block)


def _enough_micro_batches(s: LegalityContext, plan: PlanTable) -> Mask:
    m, p = num_micro_batches(s, plan), plan.pipeline
    needed = column_of(lambda r: r.micro_batches_per_rank, plan.schedule) * p
    needed = needed + column_of(lambda r: r.extra_micro_batches, plan.schedule)
    if not s.facts.short_interleaving:
        needed = np.where(column_of(lambda r: r.in_rounds, plan.schedule), p, needed)
    any_count = ~column_of(lambda r: r.needs_even_counts, plan.schedule)
    return (p == 1) | ((m >= needed) & (any_count | ((m % 2 == 0) & (p % 2 == 0))))


def _says_micro_batches(s: LegalityContext, p: PlanTable) -> str:
    schedule, m = SCHEDULES[int(p.schedule)], int(num_micro_batches(s, p))
    record = SCHEDULE_RECORDS[schedule]
    needed = p.pipeline if record.in_rounds else record.min_micro_batches(int(p.pipeline))
    if record.needs_even_counts:
        return (
            f"{schedule.value} needs an even pipeline and an even number of micro-batches, at least "
            f"{needed}: pipeline is {p.pipeline}, micro-batches {m}"
        )
    return f"{schedule.value} on {p.pipeline} ranks needs {needed} micro-batches, there are {m}"


def _says_devices(s: LegalityContext, p: PlanTable) -> str:
    inner = p.context * p.tensor * p.pipeline
    if p.data_shard == 0:
        return (
            f"data_replicate {p.data_replicate} does not divide the data width {s.num_devices // inner}, which "
            f"context {p.context} x tensor {p.tensor} x pipeline {p.pipeline} leave of {s.num_devices} devices"
        )
    return (
        f"data {p.data} x context {p.context} x tensor {p.tensor} x pipeline {p.pipeline} = "
        f"{p.num_devices} devices, the cluster has {s.num_devices}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="devices",
        scope=Scope.CHOICE,
        holds=lambda s, p: (p.num_devices == s.num_devices) & (p.data > 0),
        says=_says_devices,
    ),
    Rule(
        name="heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.num_heads),
        says=lambda s, p: f"tensor {p.tensor} does not divide {s.model.num_heads} attention heads",
    ),
    Rule(
        name="kv heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            (_splits_heads(s, p, s.model.num_kv_heads) & _splits_heads(s, p, s.model.full_kv_heads))
            | (s.model.is_mla > 0)
            | (s.model.is_shared > 0)
        ),
        says=_says_kv_heads,
        key="parallel.tensor",
    ),
    Rule(
        name="feed-forward",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.ffn) & is_divisor(p.tensor, s.model.shared_ffn),
        says=lambda s, p: (
            f"tensor {p.tensor} does not divide the feed-forward width "
            f"{s.model.ffn if s.model.ffn % p.tensor else s.model.shared_ffn}"
        ),
    ),
    Rule(
        name="state-space heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.state_heads) & is_divisor(p.tensor, s.model.state_groups),
        says=lambda s, p: (
            f"tensor {p.tensor} does not divide the {s.model.state_heads} heads and {s.model.state_groups} groups of "
            "state-space layers"
        ),
    ),
    Rule(
        name="state-space context",
        scope=Scope.SHAPE,
        holds=_states_fit_context,
        says=lambda s, p: (
            f"tensor {p.tensor} x context {p.context} does not split the {s.model.state_heads} heads and "
            f"{s.model.state_groups} groups of state-space layers, which context ranks hold parts of"
        ),
    ),
    Rule(
        name="output groups",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.output_groups) | (s.model.is_shared == 0),
        says=lambda s, p: (
            f"tensor {p.tensor} does not divide the {s.model.output_groups} groups of the output projection"
        ),
    ),
    Rule(
        name="linear attention heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.linear_heads) & is_divisor(p.tensor, linear_key_heads(s.model)),
        says=lambda s, p: (
            f"tensor {p.tensor} does not divide the {linear_key_heads(s.model)} key and {s.model.linear_heads} value "
            "heads of linear attention"
        ),
    ),
    Rule(name="linear attention context", scope=Scope.SHAPE, holds=_rule_fits_context, says=_says_rule_context),
    Rule(
        name="vocabulary",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.tensor, s.model.vocab) | s.facts.any_vocabulary,
        says=lambda s, p: f"tensor {p.tensor} does not divide the vocabulary of {s.model.vocab}",
    ),
    Rule(
        name="experts",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            is_divisor(p.expert, s.model.num_experts) if has_experts(s) else p.expert * p.expert_tensor == 1
        ),
        says=lambda s, p: (
            f"expert {p.expert} does not divide {s.model.num_experts} experts"
            if has_experts(s)
            else f"expert {p.expert} x expert_tensor {p.expert_tensor}: the model has no experts"
        ),
    ),
    Rule(
        name="expert feed-forward",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.expert_tensor, s.model.expert_ffn),
        says=lambda s, p: f"expert_tensor {p.expert_tensor} does not divide the expert width {s.model.expert_ffn}",
    ),
    Rule(
        name="expert folding",
        scope=Scope.CHOICE,
        holds=lambda _, p: is_divisor(p.expert * p.expert_tensor, p.tensor * p.context * p.data_shard),
        says=lambda _, p: (
            f"expert {p.expert} x expert_tensor {p.expert_tensor} does not divide tensor {p.tensor} x "
            f"context {p.context} x data_shard {p.data_shard} = {p.tensor * p.context * p.data_shard} ranks"
        ),
    ),
    Rule(name="layers", scope=Scope.SHAPE, holds=_layers_fit, says=_says_layers),
    Rule(name="virtual stages", scope=Scope.SHAPE, holds=_chunks_fit, says=_says_chunks),
    Rule(
        name="schedule",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.pipeline == 1) | has_schedule(p, *s.facts.schedules),
        says=lambda s, p: (
            f"{s.facts.title} has no {SCHEDULES[int(p.schedule)].value} schedule, it has: "
            f"{', '.join(x.value for x in s.facts.schedules)}"
        ),
    ),
    Rule(
        name="axis order",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            np.equal(p.data_outermost, 0)
            | (
                (AxisOrder.DATA_OUTERMOST in s.facts.axis_orders)
                & ((not has_experts(s)) | (p.expert * p.expert_tensor == p.tensor * p.context))
            )
        ),
        says=lambda s, p: (
            f"axis_order {AxisOrder.DATA_OUTERMOST} needs experts on the tensor and context ranks, as their data ranks "
            f"lie outside of the pipeline too: expert {p.expert} x expert_tensor {p.expert_tensor} is not tensor "
            f"{p.tensor} x context {p.context}"
            if AxisOrder.DATA_OUTERMOST in s.facts.axis_orders
            else f"{s.facts.title} has one order of ranks: {AxisOrder.PIPELINE_OUTERMOST}"
        ),
    ),
    Rule(
        name="sequence",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(_sequence_unit(s, p), s.batch.seq_len),
        says=lambda s, p: (
            f"context {p.context} with tensor {p.tensor} splits the sequence into multiples of "
            f"{int(_sequence_unit(s, p))} tokens, it has {s.batch.seq_len}"
        ),
    ),
    Rule(
        name="sequence parallelism",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.sequence_parallel > 0) | (p.tensor == 1) | (not has_experts(s)) | s.facts.whole_sequences,
        says=lambda s, p: f"experts with tensor {p.tensor} need sequence_parallel in {s.facts.title}",
    ),
    Rule(
        name="scale-up domain",
        scope=Scope.SHAPE,
        holds=lambda s, p: p.tensor <= s.domain,
        says=lambda s, p: (
            f"tensor {p.tensor} leaves the scale-up domain of {s.domain} devices: its collectives cross the network"
        ),
        severity=Severity.DISCOURAGED,
    ),
    Rule(
        name="global batch",
        scope=Scope.BATCH,
        holds=lambda s, p: is_divisor(p.micro_batch * p.data, s.batch.global_batch),
        says=lambda s, p: (
            f"a global batch of {s.batch.global_batch} sequences does not divide into micro-batches of "
            f"{p.micro_batch} on data width {p.data}"
        ),
    ),
    Rule(name="micro-batches", scope=Scope.BATCH, holds=_enough_micro_batches, says=_says_micro_batches),
    Rule(
        name="sharding",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: np.isin(p.sharding, s.facts.shardings),
        says=lambda s, p: (
            f"{s.facts.title} does not shard {Sharding(int(p.sharding)).name.lower()}, it offers: "
            f"{', '.join(x.name.lower() for x in s.facts.shardings)}"
        ),
        key="parallel.sharding",
    ),
    Rule(
        name="replicas",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (p.data_replicate == 1) | (p.sharding == Sharding.PARAMETERS) | s.facts.any_replicas,
        says=lambda s, p: (
            f"data_replicate {p.data_replicate} in {s.facts.title} needs sharded parameters"
            if Sharding.PARAMETERS in s.facts.shardings
            else f"{s.facts.title} shards over all data ranks: data_replicate {p.data_replicate} must be 1"
        ),
        key="parallel.data_replicate",
    ),
    Rule(
        name="recomputation",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: np.isin(p.recompute, [RECOMPUTES.index(r) for r in s.facts.recomputes]),
        says=lambda s, p: (
            f"{s.facts.title} has no recomputation {RECOMPUTES[int(p.recompute)].value!r}, it has: "
            f"{', '.join(r.value for r in s.facts.recomputes)}"
        ),
    ),
    Rule(
        name="recomputed modules",
        scope=Scope.CHOICE_ONLY,
        holds=_selective_offered,
        says=lambda s, p: f"{s.facts.title} cannot recompute {module_names(int(p.recompute_mask))} selectively",
    ),
    Rule(
        name="recomputed modules exist",
        scope=Scope.CHOICE_ONLY,
        holds=_modules_exist,
        says=lambda s, p: f"recomputing {module_names(int(p.recompute_mask))}: this model has not all of them",
    ),
    Rule(
        name="recomputed layers",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            (p.recompute_layers < 0)
            | ((p.recompute_layers < -(-s.model.num_layers // np.maximum(p.pipeline, 1))) & s.facts.partial_full)
        ),
        says=lambda s, p: (
            f"recomputing {p.recompute_layers} layers of a rank needs an engine that can, and a rank "
            f"with more: here {-(-s.model.num_layers // p.pipeline)}"
        ),
        key="parallel.recompute.layers",
    ),
    Rule(
        name="modules with stored activations",
        scope=Scope.CHOICE,
        holds=lambda s, p: np.isin(p.stored_mask, [-1, 0]) | bool(s.facts.stored_modules),
        says=lambda s, _: f"{s.facts.title} stores no activations in 8 bits",
    ),
    Rule(name="weight cache", scope=Scope.CHOICE, holds=_cache_offered, says=_says_cache),
    Rule(
        name="chunks of the loss",
        scope=Scope.CHOICE,
        holds=lambda s, p: (np.asarray(p.loss_chunk) < 0) | s.facts.loss_chunks,
        says=_says_loss,
    ),
    Rule(
        name="states in host memory",
        scope=Scope.CHOICE_ONLY,
        holds=lambda s, p: (np.asarray(p.offload_optimizer) == 0) | s.facts.offloads_optimizer,
        says=lambda s, _: f"{s.facts.title} keeps optimizer states on the device: offload must be none",
        key="parallel.offload",
    ),
)
"""Rules that engines share, in the order in which messages name it."""


@cache
def rules_of(facts: EngineFacts) -> tuple[Rule, ...]:
    """The shared rules and the engine's own, in the order in which messages name them."""
    place = {rule.name: i for i, rule in enumerate(RULES)}
    return tuple(sorted((*RULES, *facts.rules), key=lambda rule: place.get(rule.after or rule.name, len(RULES))))
