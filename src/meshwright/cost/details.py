"""Names of what components of a step spend their time on: the head and its loss, element-wise kernels, casts.

A component is calibrated as a whole. Its parts have the shares that the formulas of `compute` and `casts` give them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.casts import cast_passes
from meshwright.cost.compute import compute_details
from meshwright.cost.layers import StepContext, accumulation, dequantised
from meshwright.cost.rates import SystemRates
from meshwright.cost.step import StepTable, step_context
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable, WeightCache


def step_details(
    *,
    model: ModelTable,
    batch: BatchTable,
    plan: PlanTable,
    precision: PrecisionTable,
    rates: SystemRates,
    steps: StepTable,
    load_factor: float = 1.0,
) -> dict[str, dict[str, float]]:
    """Seconds of a step's components by name. `steps`: the row of the plan. The names of a component add up to it."""
    context = step_context(
        model=model, batch=batch, plan=plan, precision=precision, rates=rates, load_factor=load_factor
    )
    parts = compute_details(context.shapes)
    parts["head"]["accumulation of gradients"] = _accumulated(context)
    parts["casts"] = _casts(context)
    found = {}
    for component, seconds in parts.items():
        raw = {name: _number(s) for name, s in seconds.items() if _number(s)}
        scale = _number(steps.components_s.get(component, 0.0)) / (sum(raw.values()) or 1.0)
        found[component] = {name: s * scale for name, s in raw.items()}
    return found


def _accumulated(s: StepContext) -> Array:
    """Seconds in which embedding and head add their gradients to the sum of earlier micro-batches."""
    tensor, num_heads = s.plan.tensor, 1 + s.model.num_mtp_layers
    embedding, head = (accumulation(s, p / tensor).total_s for p in (s.parameters.embedding, s.parameters.head))
    return embedding + num_heads * head


def _casts(s: StepContext) -> dict[str, Array]:
    """Casts of stored activations and of weights, and frozen weights made whole, of all layers and one micro-batch."""
    streaming = s.rates.device.streaming_bytes_per_s
    stored_only = replace(s.precision, weight_cache=WeightCache.CALIBRATED)

    kinds = ((s.model.num_dense_layers, False), (s.model.num_moe_layers, True))

    def of_layers(formats: PrecisionTable) -> Array:
        facts = (s.model, s.batch, s.plan, formats, s.parameters, s.tokens, streaming)
        return sum(count * cast_passes(*facts, is_moe=is_moe).total_s for count, is_moe in kinds if np.any(count))

    stored = of_layers(stored_only)
    whole = sum(count * dequantised(s, is_moe=is_moe).total_s for count, is_moe in kinds if np.any(count))
    return {
        "stored activations": stored,
        "weights": of_layers(s.precision) - stored,
        "dequantised frozen weights": whole,
    }


def _number(value: Array) -> float:
    return float(np.ravel(np.asarray(value))[0])
