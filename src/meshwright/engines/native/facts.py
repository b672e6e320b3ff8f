"""Facts about Meshwright's own engine for the planner: its schedules, recomputation and rules."""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Mask
from meshwright.cost.pipeline.schedules import schedules_with
from meshwright.cost.tables import RECOMPUTES, PlanTable, stored_column
from meshwright.planner.engines import EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import has_experts, has_schedule, mask_of, module_names
from meshwright.specs.plan import (
    DROPPED_MODULES,
    SCHEDULES,
    STORED_MODULES,
    WEIGHT_CACHES,
    Recompute,
    Sharding,
)

STORED_OR_RECOMPUTED = {
    "feed_forward": ("mlp", "moe", "shared_experts", "activation", "alternate_matmuls"),
    "norm": ("norm", "alternate_matmuls"),
}
"""Modules whose recomputation leaves nothing to store in 8 bits, by those of `kernels.stored_activations`."""


def _stored_once(s: LegalityContext, plan: PlanTable) -> Mask:
    """Nothing is both stored in 8 bits and recomputed."""
    stored = np.where(np.asarray(plan.stored_mask) < 0, stored_column(s.stored), plan.stored_mask)
    excluded = sum(
        (stored >> i & 1) * mask_of(*STORED_OR_RECOMPUTED[module]) for i, module in enumerate(STORED_MODULES)
    )
    layers_stay = np.not_equal(plan.recompute, RECOMPUTES.index(Recompute.FULL))
    return (stored == 0) | (layers_stay & ((np.asarray(plan.recompute_mask) & excluded) == 0))


def _says_stored(s: LegalityContext, plan: PlanTable) -> str:
    said = int(plan.stored_mask)
    names = s.stored if said < 0 else [m for i, m in enumerate(STORED_MODULES) if said >> i & 1]
    return f"activations of {', '.join(sorted(names))} are stored in 8 bits, not recomputed"


RULES = (
    Rule(
        name="context of prediction modules",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.num_mtp_layers == 0) | (np.asarray(p.context) == 1),
        says=lambda s, p: (
            f"multi-token prediction reads the next tokens, which are on other context ranks: context {p.context} "
            "must be 1"
        ),
    ),
    Rule(
        name="stored activations",
        scope=Scope.CHOICE,
        holds=_stored_once,
        says=_says_stored,
    ),
    Rule(
        name="expert tensor width",
        scope=Scope.SHAPE,
        holds=lambda s, p: (p.expert_tensor == p.tensor) | (p.expert_tensor == 1),
        says=lambda s, p: f"expert_tensor {p.expert_tensor} is neither 1 nor tensor {p.tensor}",
        after="expert folding",
    ),
    Rule(
        name="recomputation under zero bubble",
        scope=Scope.CHOICE,
        holds=lambda _, p: (
            ~(has_schedule(p, *schedules_with(lambda r: r.splits_backward)) & (p.pipeline > 1))
            | (
                np.not_equal(p.recompute, RECOMPUTES.index(Recompute.FULL))
                & ((np.asarray(p.recompute_mask) & ~mask_of(*DROPPED_MODULES)) == 0)
            )
        ),
        says=lambda _, p: (
            f"{SCHEDULES[int(p.schedule)].value} would compute {module_names(int(p.recompute_mask))} again twice, "
            f"for gradients of inputs and of weights: it goes with {', '.join(DROPPED_MODULES)}"
        ),
    ),
    Rule(
        name="recomputed norms",
        scope=Scope.CHOICE,
        holds=lambda _, p: (p.tensor == 1) | ((np.asarray(p.recompute_mask) & mask_of("norm")) == 0),
        says=lambda _, p: (
            f"with tensor {p.tensor} the gathered outputs of norms are kept: to recompute them frees nothing"
        ),
    ),
    Rule(
        name="norms of outputs",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            (s.model.norms_inputs > 0) | ((np.asarray(p.recompute_mask) & mask_of("norm")) == 0)
        ),
        says=lambda _, p: (
            "the model normalises only outputs of attention and feed-forward, which nothing keeps"
        ),
    ),
    Rule(
        name="norms over all heads",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.norms_all_heads == 0) | (p.tensor == 1),
        says=lambda _, p: (
            f"queries and keys are normalised over all heads, which tensor {p.tensor} would divide"
        ),
    ),
    Rule(
        name="biased experts",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.expert_bias == 0) | (p.expert_tensor == 1),
        says=lambda _, p: (
            f"each of expert_tensor {p.expert_tensor} ranks would add the biases of an expert's output"
        ),
    ),
    Rule(
        name="alternate GEMMs",
        scope=Scope.CHOICE,
        holds=lambda s, p: (
            ((np.asarray(p.recompute_mask) & mask_of("alternate_matmuls")) == 0)
            | (
                (np.asarray(p.recompute_mask) == mask_of("alternate_matmuls"))
                & ((p.expert * p.expert_tensor * p.tensor == 1) | (not has_experts(s)))
            )
        ),
        says=lambda _, p: "alternate_matmuls stands alone, and needs whole experts on every rank",
    ),
)

FACTS = EngineFacts(
    title="native",
    stack="native",
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
    stored_modules=STORED_MODULES,
    weight_caches=WEIGHT_CACHES,
    loss="logits of a chunk of tokens at once, which their gradient overwrites",
    loss_chunks=True,
    rules=RULES,
    source="Meshwright's own engine",
)
