"""Legality: the plans that an engine accepts, for one plan and for a million.

`legal_mask` evaluates the rules of `planner.rules` over a whole table, `violations` turns those that fail for
one plan into sentences. Both read the same rules, so "why not TP=8" has the answer that the search acted on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.catalog.stacks import features_of
from meshwright.cost.tables import BatchTable, PlanTable, chunk_column, model_row, plan_row
from meshwright.planner.engines import LegalityContext, Scope, Severity, engine_facts
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import rules_of
from meshwright.specs.plan import Plan, listed_layers
from meshwright.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One rule that one plan breaks."""

    rule: str
    message: str
    severity: Severity = Severity.REFUSED
    key: str = "parallel"  # of a run file
    hint: str | None = None

    def __str__(self) -> str:
        return self.message


def legality_context(request: PlanRequest) -> LegalityContext:
    """The legality context of a request."""
    return _context(
        request,
        engine=request.engine,
        batch=replace(request.batch_table, global_batch=request.batch_of_part),
        num_devices=request.num_devices,
        domain=request.cluster.fabric.scale_up_domain,
        is_compiled=request.is_compiled,
    )


def run_context(run: Run, plan: Plan, *, engine: str) -> LegalityContext:
    """The legality context of `plan` for `run` with `engine`, on as many devices as the plan has."""
    return _context(
        run,
        engine=engine,
        batch=BatchTable(seq_len=run.sequence_length, global_batch=run.global_batch),
        num_devices=plan.num_devices,
        domain=plan.num_devices,
        is_compiled=run.train.compile,
    )


def _context(
    asked: PlanRequest | Run, *, engine: str, batch: BatchTable, num_devices: int, domain: int, is_compiled: bool
) -> LegalityContext:
    linear_bytes = asked.precision.linear_input_bytes
    device = None if asked.cluster is None else asked.cluster.accelerator
    return LegalityContext(
        model=model_row(asked.model, lora=asked.lora),
        batch=batch,
        num_devices=num_devices,
        domain=domain,
        facts=engine_facts(engine),
        stored=frozenset(asked.kernels.stored_activations),
        narrow_weights=linear_bytes < 2,
        element_bytes=max(float(linear_bytes), 2.0),
        precision=asked.precision.name,
        optimizer=asked.optimizer,
        is_compiled=is_compiled,
        counts_labels=(asked.label_tokens if isinstance(asked, Run) else asked.part_batch) is not None,
        drops_attention=(asked.train if isinstance(asked, Run) else asked).attention_dropout > 0,
        has_pairs=(asked.train if isinstance(asked, Run) else asked).preference is not None,
        has_completions=(asked.train if isinstance(asked, Run) else asked).grpo is not None,
        caches_weights=asked.kernels.weight_cache == "on",
        loss_chunk=chunk_column(asked.kernels.loss_chunk),
        jax_devices=1 if device is None else device.jax_devices,
        software=features_of(asked.stack, device, precision=asked.precision.name),
    )


def legal_mask(plan: PlanTable, *, context: LegalityContext, scope: Scope | None = None) -> NDArray[np.bool_]:
    """True for rows that break no rule of `scope` (None: of any scope) that refuses."""
    legal = np.ones(np.shape(plan.tensor), dtype=bool)
    left = np.flatnonzero(legal)
    for rule in rules_of(context.facts):
        if scope in (None, rule.scope) and rule.severity is Severity.REFUSED:
            holds = np.broadcast_to(np.asarray(rule.holds(context, plan), dtype=bool), np.shape(left))
            legal[left[~holds]] = False
            kept = np.flatnonzero(legal[left])
            if 2 * len(kept) < len(left):  # the others are not asked the next rules
                left, plan = left[kept], plan.take(kept)
    return legal


def violations(plan: Plan, *, context: LegalityContext) -> list[Violation]:
    """Every rule that `plan` breaks, refusals first. Empty: the engine accepts it."""
    split = _layer_split(plan, context=context)
    row = plan_row(replace(plan, layers_per_stage=None) if split else plan)
    broken = [r for r in rules_of(context.facts) if not bool(r.holds(context, row))]
    found = []
    for rule in broken:
        message, hint = rule.explained(context, row)
        found.append(Violation(rule=rule.name, message=message, severity=rule.severity, key=rule.key, hint=hint))
    return sorted(found + split, key=lambda v: v.severity is not Severity.REFUSED)


def _layer_split(plan: Plan, *, context: LegalityContext) -> list[Violation]:
    """`layers_per_stage` must hold all layers of the model, one number for each stage."""
    given, stages = plan.layers_per_stage, plan.pipeline * plan.virtual_pipeline
    if given is None:
        return []
    num_layers = int(context.model.num_layers)
    messages = []
    if len(given) != stages:
        messages.append(f"has {len(given)} stages, pipeline x virtual_pipeline are {stages}")
    if sum(given) != num_layers or min(given, default=0) < 0:
        messages.append(f"adds up to {sum(given)}, the model has {num_layers} layers")
    return [
        Violation(
            rule="layers per stage",
            message=f"layers_per_stage {listed_layers(given)} {message}",
            key="parallel.layers_per_stage",
        )
        for message in messages
    ]


def broken_rules(plan: PlanTable, *, context: LegalityContext) -> NDArray[np.int64]:
    """Number of refusing rules that each row breaks."""
    broken = np.zeros(np.shape(plan.tensor), dtype=np.int64)
    for rule in rules_of(context.facts):
        if rule.severity is Severity.REFUSED:
            broken += ~np.asarray(rule.holds(context, plan), dtype=bool)
    return broken
