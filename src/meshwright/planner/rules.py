"""The legality rules: what each engine refuses, as predicates over tables and sentences with numbers.

Sources: the validators of the engine versions named in `planner.engines`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np

from meshwright.cost.tables import RECOMPUTES, SCHEDULES, Array, BatchTable, ModelTable, PlanTable
from meshwright.planner.engines import EngineFacts
from meshwright.specs.plan import DROPPED_MODULES, RECOMPUTE_MODULES, Recompute, Schedule, Sharding
from meshwright.specs.run import Engine


class Scope(IntEnum):
    """Which part of a plan a rule looks at; the search asks each as early as it can."""

    SHAPE = 0  # degrees and schedule
    BATCH = 1  # ... and the micro-batch
    CHOICE = 2  # ... and sharding, recomputation, offload


class Severity(Enum):
    """What a broken rule means."""

    REFUSED = "refused"  # the engine does not run it
    DISCOURAGED = "discouraged"  # it runs, and is known to be slow


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything but the plan that legality depends on."""

    model: ModelTable
    batch: BatchTable
    num_devices: int
    domain: int  # devices joined by the scale-up link
    facts: EngineFacts


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`holds` is true where a plan keeps the rule; `says` explains one plan that does not."""

    name: str
    scope: Scope
    holds: Callable[[Setting, PlanTable], Array]
    says: Callable[[Setting, PlanTable], str]
    engines: frozenset[Engine] = frozenset(Engine)
    severity: Severity = Severity.REFUSED


def _divides(part: Array, whole: Array) -> Array:
    return np.asarray(whole) % np.maximum(part, 1) == 0


def num_micro_batches(setting: Setting, plan: PlanTable) -> Array:
    """Micro-batches per step, rounded down; 0 where the global batch is too small."""
    return setting.batch.global_batch // np.maximum(plan.micro_batch * plan.data, 1)


def _is(plan: PlanTable, *schedules: Schedule) -> Array:
    return np.isin(plan.schedule, [SCHEDULES.index(s) for s in schedules])


def _has_experts(setting: Setting) -> bool:
    return setting.model.num_experts > 0


def _layers_fit(s: Setting, plan: PlanTable) -> Array:
    """Middle stages take ceil(L / S) layers; what is left for the first and the last must not be negative."""
    num_layers, stages = s.model.num_layers, plan.pipeline * plan.virtual_pipeline
    if not s.facts.uneven_layers:
        return _divides(stages, num_layers)
    middle = -(-num_layers // np.maximum(stages, 1))
    return (num_layers - (stages - 2) * middle >= 0) & (stages <= num_layers + 2)


def _says_layers(s: Setting, p: PlanTable) -> str:
    stages = p.pipeline * p.virtual_pipeline
    shared = " even if the first and the last hold fewer" if s.facts.uneven_layers else ""
    return (
        f"{s.model.num_layers} layers do not lie on pipeline {p.pipeline} x virtual {p.virtual_pipeline}"
        f" = {stages} stages{shared}"
    )


def _chunks_fit(_: Setting, plan: PlanTable) -> Array:
    v, alone = plan.virtual_pipeline, plan.pipeline == 1
    several = _is(plan, Schedule.INTERLEAVED)
    vee = _is(plan, Schedule.ZBV)
    pipelined = np.where(several, v > 1, np.where(vee, v == 2, v == 1))
    return np.where(alone, v == 1, pipelined)


def _says_chunks(_: Setting, p: PlanTable) -> str:
    if p.pipeline == 1:
        return f"virtual_pipeline {p.virtual_pipeline} needs a pipeline of 2 ranks or more, there is 1"
    schedule = SCHEDULES[int(p.schedule)]
    needed = {Schedule.INTERLEAVED: "2 or more", Schedule.ZBV: "exactly 2"}.get(schedule, "exactly 1")
    return f"{schedule.value} needs {needed} virtual stages per rank, there are {p.virtual_pipeline}"


def _selective_offered(s: Setting, plan: PlanTable) -> Array:
    other = np.not_equal(plan.recompute, RECOMPUTES.index(Recompute.SELECTIVE))
    if s.facts.selective is None:
        return other | (plan.recompute_mask > 0)
    masks = [_mask(*modules) for modules in s.facts.selective]
    return other | np.isin(plan.recompute_mask, masks)


def _mask(*modules: str) -> int:
    return sum(1 << RECOMPUTE_MODULES.index(m) for m in modules)


def _names(mask: int) -> str:
    return ", ".join(m for i, m in enumerate(RECOMPUTE_MODULES) if mask >> i & 1) or "nothing"


def _modules_exist(s: Setting, plan: PlanTable) -> Array:
    """Modules that the model has; Megatron recomputes activations apart only inside experts."""
    absent = [] if _has_experts(s) else ["moe"]
    absent += [] if s.model.is_mla else ["mla_up_projection"]
    absent += [] if s.model.shared_ffn else ["shared_experts"]
    absent += ["activation"] if s.facts.engine is Engine.MEGATRON and not _has_experts(s) else []
    return (np.asarray(plan.recompute_mask) & _mask(*absent)) == 0


def _sequence_unit(s: Setting, plan: PlanTable) -> Array:
    """The sequence must be a multiple of this: two slices per context rank, each split over tensor ranks."""
    context = np.where(plan.context > 1, 2 * plan.context, 1)
    block = np.where(plan.context > 1, 128 * plan.context, 1) if s.facts.engine is Engine.TORCHTITAN else 1
    return np.lcm(context * np.where(plan.sequence_parallel > 0, plan.tensor, 1), block)


def _enough_micro_batches(s: Setting, plan: PlanTable) -> Array:
    m, p = num_micro_batches(s, plan), plan.pipeline
    dual = _is(plan, Schedule.DUALPIPE)
    needed = np.where(dual, 2 * p, np.where(_is(plan, Schedule.ZBV), 2 * p - 1, 1))
    if s.facts.engine is Engine.MEGATRON:
        needed = np.where(_is(plan, Schedule.INTERLEAVED), p, needed)
    return (p == 1) | ((m >= needed) & (~dual | ((m % 2 == 0) & (p % 2 == 0))))


def _says_micro_batches(s: Setting, p: PlanTable) -> str:
    schedule, m = SCHEDULES[int(p.schedule)], int(num_micro_batches(s, p))
    if schedule is Schedule.DUALPIPE:
        return (
            "dualpipe needs an even pipeline and an even number of micro-batches, at least "
            f"{2 * p.pipeline}: pipeline is {p.pipeline}, micro-batches {m}"
        )
    needed = 2 * p.pipeline - 1 if schedule is Schedule.ZBV else p.pipeline
    return f"{schedule.value} on {p.pipeline} ranks needs {needed} micro-batches, there are {m}"


def _rounds(s: Setting, plan: PlanTable) -> Array:
    """torch.distributed.pipelining runs interleaved micro-batches in max(1, m // p) rounds of equal size."""
    m = num_micro_batches(s, plan)
    rounds = np.maximum(m // np.maximum(plan.pipeline, 1), 1)
    return ~_is(plan, Schedule.INTERLEAVED) | (plan.pipeline == 1) | (m % rounds == 0)


def _says_devices(s: Setting, p: PlanTable) -> str:
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


def _only(*engines: Engine) -> frozenset[Engine]:
    return frozenset(engines)


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
        holds=lambda s, p: _divides(p.tensor, s.model.num_heads),
        says=lambda s, p: f"tensor {p.tensor} does not divide {s.model.num_heads} attention heads",
    ),
    Rule(
        name="kv heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: _divides(p.tensor, s.model.num_kv_heads) | (s.model.is_mla > 0),
        says=lambda s, p: f"tensor {p.tensor} does not divide {s.model.num_kv_heads} key/value heads",
        engines=_only(Engine.NATIVE, Engine.TORCHTITAN, Engine.MAXTEXT),
    ),
    Rule(
        name="kv heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            _divides(p.tensor, s.model.num_kv_heads)
            | _divides(s.model.num_kv_heads, p.tensor)
            | (s.model.is_mla > 0)
        ),
        says=lambda s, p: (
            f"tensor {p.tensor} neither divides nor repeats {s.model.num_kv_heads} key/value heads"
        ),
        engines=_only(Engine.MEGATRON),
    ),
    Rule(
        name="feed-forward",
        scope=Scope.SHAPE,
        holds=lambda s, p: _divides(p.tensor, s.model.ffn) & _divides(p.tensor, s.model.shared_ffn),
        says=lambda s, p: (
            f"tensor {p.tensor} does not divide the feed-forward width "
            f"{s.model.ffn if s.model.ffn % p.tensor else s.model.shared_ffn}"
        ),
    ),
    Rule(
        name="vocabulary",  # Megatron pads the table, torchtitan shards it unevenly, the others do neither
        scope=Scope.SHAPE,
        holds=lambda s, p: _divides(p.tensor, s.model.vocab),
        says=lambda s, p: f"tensor {p.tensor} does not divide the vocabulary of {s.model.vocab}",
        engines=_only(Engine.NATIVE, Engine.MAXTEXT),
    ),
    Rule(
        name="experts",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            _divides(p.expert, s.model.num_experts) if _has_experts(s) else p.expert * p.expert_tensor == 1
        ),
        says=lambda s, p: (
            f"expert {p.expert} does not divide {s.model.num_experts} experts"
            if _has_experts(s)
            else f"expert {p.expert} x expert_tensor {p.expert_tensor}: the model has no experts"
        ),
    ),
    Rule(
        name="expert feed-forward",
        scope=Scope.SHAPE,
        holds=lambda s, p: _divides(p.expert_tensor, s.model.expert_ffn),
        says=lambda s, p: (
            f"expert_tensor {p.expert_tensor} does not divide the expert width {s.model.expert_ffn}"
        ),
    ),
    Rule(
        name="expert folding",
        scope=Scope.CHOICE,
        holds=lambda _, p: _divides(p.expert * p.expert_tensor, p.tensor * p.context * p.data_shard),
        says=lambda _, p: (
            f"expert {p.expert} x expert_tensor {p.expert_tensor} does not divide tensor {p.tensor} x "
            f"context {p.context} x data_shard {p.data_shard} = {p.tensor * p.context * p.data_shard} ranks"
        ),
    ),
    Rule(
        name="expert tensor width",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.expert_tensor == p.tensor) | (p.expert_tensor == 1),
        says=lambda s, p: f"expert_tensor {p.expert_tensor} is neither 1 nor tensor {p.tensor}",
        engines=_only(Engine.NATIVE),
    ),
    Rule(
        name="expert tensor width",
        scope=Scope.SHAPE,
        holds=lambda s, p: p.expert_tensor == 1,
        says=lambda s, p: f"expert_tensor {p.expert_tensor}: torchtitan 0.3.0 keeps every expert whole",
        engines=_only(Engine.TORCHTITAN),
    ),
    Rule(
        name="expert axis",
        scope=Scope.SHAPE,
        holds=lambda s, p: (
            _divides(p.expert, p.data) & ((p.expert_tensor == p.tensor) | (not _has_experts(s)))
        ),
        says=lambda s, p: (
            f"MaxText's expert axis is a part of its batch axes and experts are split like the rest: expert "
            f"{p.expert} must divide data {p.data}, expert_tensor {p.expert_tensor} must be tensor {p.tensor}"
        ),
        engines=_only(Engine.MAXTEXT),
    ),
    Rule(
        name="layers",
        scope=Scope.SHAPE,
        holds=_layers_fit,
        says=_says_layers,
    ),
    Rule(
        name="virtual stages",
        scope=Scope.SHAPE,
        holds=_chunks_fit,
        says=_says_chunks,
    ),
    Rule(
        name="schedule",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.pipeline == 1) | _is(p, *s.facts.schedules),
        says=lambda s, p: (
            f"{s.facts.title} has no {SCHEDULES[int(p.schedule)].value} schedule, it has: "
            f"{', '.join(x.value for x in s.facts.schedules)}"
        ),
    ),
    Rule(
        name="sequence",
        scope=Scope.SHAPE,
        holds=lambda s, p: _divides(_sequence_unit(s, p), s.batch.seq_len),
        says=lambda s, p: (
            f"context {p.context} with tensor {p.tensor} splits the sequence into multiples of "
            f"{int(_sequence_unit(s, p))} tokens, it has {s.batch.seq_len}"
        ),
    ),
    Rule(
        name="sequence parallelism",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.sequence_parallel > 0) | (p.tensor == 1) | (not _has_experts(s)),
        says=lambda s, p: f"experts with tensor {p.tensor} need sequence_parallel in {s.facts.title}",
        engines=_only(Engine.NATIVE, Engine.MEGATRON),
    ),
    Rule(
        name="scale-up domain",
        scope=Scope.SHAPE,
        holds=lambda s, p: p.tensor <= s.domain,
        says=lambda s, p: (
            f"tensor {p.tensor} leaves the scale-up domain of {s.domain} devices: "
            "its collectives cross the network"
        ),
        severity=Severity.DISCOURAGED,
    ),
    Rule(
        name="global batch",
        scope=Scope.BATCH,
        holds=lambda s, p: _divides(p.micro_batch * p.data, s.batch.global_batch),
        says=lambda s, p: (
            f"a global batch of {s.batch.global_batch} sequences does not divide into micro-batches of "
            f"{p.micro_batch} on data width {p.data}"
        ),
    ),
    Rule(
        name="micro-batches",
        scope=Scope.BATCH,
        holds=_enough_micro_batches,
        says=_says_micro_batches,
    ),
    Rule(
        name="micro-batch rounds",
        scope=Scope.BATCH,
        holds=_rounds,
        says=lambda s, p: (
            f"{int(num_micro_batches(s, p))} micro-batches do not divide into the "
            f"{max(1, int(num_micro_batches(s, p)) // int(p.pipeline))} rounds of torch's interleaving"
        ),
        engines=_only(Engine.TORCHTITAN),
    ),
    Rule(
        name="micro-batch rounds",
        scope=Scope.BATCH,
        holds=lambda s, p: _divides(p.pipeline, num_micro_batches(s, p)),
        says=lambda s, p: (
            f"{int(num_micro_batches(s, p))} micro-batches are no multiple of MaxText's {p.pipeline} stages"
        ),
        engines=_only(Engine.MAXTEXT),
    ),
    Rule(
        name="sharding",
        scope=Scope.CHOICE,
        holds=lambda s, p: np.isin(p.sharding, s.facts.shardings),
        says=lambda s, p: (
            f"{s.facts.title} does not shard {Sharding(int(p.sharding)).name.lower()}, it offers: "
            f"{', '.join(x.name.lower() for x in s.facts.shardings)}"
        ),
    ),
    Rule(
        name="replicas",
        scope=Scope.CHOICE,
        holds=lambda _, p: (p.data_replicate == 1) | (p.sharding == Sharding.PARAMETERS),
        says=lambda s, p: f"data_replicate {p.data_replicate} in {s.facts.title} needs sharded parameters",
        engines=_only(Engine.NATIVE, Engine.TORCHTITAN, Engine.MAXTEXT),
    ),
    Rule(
        name="fully sharded width",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            (p.sharding != Sharding.PARAMETERS) | _divides(p.data_shard * p.context, s.model.hidden)
        ),
        says=lambda s, p: (
            f"data_shard {p.data_shard} x context {p.context} does not divide "
            f"the hidden width {s.model.hidden}"
        ),
        engines=_only(Engine.MAXTEXT),
    ),
    Rule(
        name="recomputation",
        scope=Scope.CHOICE,
        holds=lambda s, p: np.isin(p.recompute, [RECOMPUTES.index(r) for r in s.facts.recomputes]),
        says=lambda s, p: (
            f"{s.facts.title} has no recomputation {RECOMPUTES[int(p.recompute)].value!r}, it has: "
            f"{', '.join(r.value for r in s.facts.recomputes)}"
        ),
    ),
    Rule(
        name="recomputed modules",
        scope=Scope.CHOICE,
        holds=_selective_offered,
        says=lambda s, p: f"{s.facts.title} cannot recompute {_names(int(p.recompute_mask))} selectively",
    ),
    Rule(
        name="recomputed modules exist",
        scope=Scope.CHOICE,
        holds=_modules_exist,
        says=lambda s, p: f"recomputing {_names(int(p.recompute_mask))}: this model has not all of them",
    ),
    Rule(
        name="recomputed layers",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            (p.recompute_layers < 0)
            | (
                (p.recompute_layers < -(-s.model.num_layers // np.maximum(p.pipeline, 1)))
                & s.facts.partial_full
            )
        ),
        says=lambda s, p: (
            f"recomputing {p.recompute_layers} layers of a rank needs an engine that can, and a rank "
            f"with more: here {-(-s.model.num_layers // p.pipeline)}"
        ),
    ),
    Rule(
        name="recomputation under zero bubble",
        scope=Scope.CHOICE,
        holds=lambda _, p: ~_is(p, Schedule.ZBV) | (p.recompute == RECOMPUTES.index(Recompute.NONE)),
        says=lambda _, p: "torchtitan 0.3.0 runs its zero-bubble schedules only without recomputation",
        engines=_only(Engine.TORCHTITAN),
    ),
    Rule(
        name="recomputation under zero bubble",
        scope=Scope.CHOICE,
        holds=lambda _, p: (
            ~(_is(p, Schedule.ZERO_BUBBLE, Schedule.ZBV) & (p.pipeline > 1))
            | (
                np.not_equal(p.recompute, RECOMPUTES.index(Recompute.FULL))
                & ((np.asarray(p.recompute_mask) & ~_mask(*DROPPED_MODULES)) == 0)
            )
        ),
        says=lambda _, p: (
            f"{SCHEDULES[int(p.schedule)].value} would compute {_names(int(p.recompute_mask))} again twice, "
            f"for gradients of inputs and of weights: it goes with {', '.join(DROPPED_MODULES)}"
        ),
        engines=_only(Engine.NATIVE),
    ),
    Rule(
        name="recomputed norms",
        scope=Scope.CHOICE,
        holds=lambda _, p: (p.tensor == 1) | ((np.asarray(p.recompute_mask) & _mask("norm")) == 0),
        says=lambda _, p: (
            f"with tensor {p.tensor} the gathered outputs of norms are kept: to recompute them frees nothing"
        ),
        engines=_only(Engine.NATIVE),
    ),
    Rule(
        name="alternate matrix products",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            ((np.asarray(p.recompute_mask) & _mask("alternate_matmuls")) == 0)
            | (
                (np.asarray(p.recompute_mask) == _mask("alternate_matmuls"))
                & ((p.expert * p.expert_tensor * p.tensor == 1) | (not _has_experts(s)))
            )
        ),
        says=lambda _, p: "alternate_matmuls stands alone, and needs whole experts on every rank",
        engines=_only(Engine.NATIVE),
    ),
)
