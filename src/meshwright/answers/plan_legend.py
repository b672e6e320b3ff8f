"""Sentences on the words of a plan's short form that nothing beneath a table of plans would explain otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from meshwright.planner.savings import ROUNDING_WORTH, note_on_loss, note_on_savings
from meshwright.specs.plan import AxisOrder, Plan, listed_layers

MODULES = {
    "core_attention": "scores, softmax and values of attention",
    "norm": "norms",
    "activation": "activation functions of feed-forward layers",
    "mla_up_projection": "up-projections of latent attention",
    "mlp": "feed-forward layers",
    "moe": "layers of experts",
    "shared_experts": "shared experts",
    "alternate_matmuls": "every second GEMM and all other operations",
}
ROUNDED = "*"
"""Mark of a plan that ranks behind faster ones, as it rounds what it keeps."""


def mark_of(plan: Plan) -> str:
    """The mark behind a plan in a table."""
    return f" {ROUNDED}" if plan.stored_activations else ""


def explained(plans: Sequence[Plan], *, fixed: Sequence[str] = ()) -> list[str]:
    """A sentence for each kind of word in the short forms of `plans`; `fixed`: fields that the question holds."""
    modules = tuple(dict.fromkeys(module for p in plans for module in p.recompute_modules))
    named = ", ".join(f"{module} ({MODULES[module]})" for module in modules)
    found = [
        _layers(next((p.layers_per_stage for p in plans if p.pipeline > 1 and p.layers_per_stage), ())),
        f"recompute: the backward pass computes these again: {named}" if modules else None,
        next((_order(p.axis_order) for p in plans if p.axis_order is not AxisOrder.PIPELINE_OUTERMOST), None),
        *dict.fromkeys(note_on_savings(p) for p in plans),
        *([] if "loss_chunk" in fixed else dict.fromkeys(note_on_loss(p) for p in plans)),
    ]
    if any(p.stored_activations for p in plans) and not all(p.stored_activations for p in plans):
        found.append(f"{ROUNDED} ranks as if it took {ROUNDING_WORTH - 1:.0%} longer, as it rounds gradients")
    return [f"{said}." for said in found if said]


def _layers(layers: tuple[int, ...]) -> str | None:
    if not layers:
        return None
    groups = [(len(list(group)), count) for count, group in groupby(layers)]
    stages = ", then ".join(f"{n} {'stage' if n == 1 else 'stages'} of {count}" for n, count in groups)
    return f"layers={listed_layers(layers)}: layers of the stages of the pipeline in their order: {stages}"


def _order(order: AxisOrder) -> str:
    usual = AxisOrder.PIPELINE_OUTERMOST
    return f"order={order}: kinds of parallelism from neighbouring ranks to distant ones (usual: {usual})"
