"""Settings of a torchtitan configuration that contradict each other or have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from meshwright.cost.stages import layers_per_stage
from meshwright.engines.torchtitan.config_trees.models import ImportedModel
from meshwright.engines.torchtitan.config_trees.pipeline_stages import layers_on_stages

SWITCHES = {
    "checkpoint.enable": ("async_mode", "folder", "initial_load_path", "interval", "keep_latest_k"),
    "compile.enable": ("backend", "components"),
    "validator.enable": ("freq", "steps"),
}
"""Settings that have no effect unless their switch is on."""


def contradictions(values: Mapping[str, Any], *, given: Set[str], model: ImportedModel) -> Iterator[str]:
    """Yield notes on `values` (`section.key` -> value), of which `given` are not at torchtitan's defaults."""
    for switch, names in SWITCHES.items():
        idle = [path for name in names if (path := f"{switch.partition('.')[0]}.{name}") in given]
        if idle and not values[switch]:
            yield f"{', '.join(idle)} has no effect: {switch} is false"
    yield from _degrees(values, given, model)
    yield from _learning_rates(values)
    if model.recipe is not None and not (values["compile.enable"] and "model" in values["compile.components"]):
        yield f"{model.recipe} without compile.enable of the model is slower than bf16"
    if model.max_sequence is not None and values["training.seq_len"] > model.max_sequence:
        yield f"training.seq_len = {values['training.seq_len']} is more than rope.max_seq_len = {model.max_sequence}"
    if values.get("debug.moe_force_load_balance"):
        yield "debug.moe_force_load_balance: experts are chosen round-robin, not by the router"


def _degrees(values: Mapping[str, Any], given: Set[str], model: ImportedModel) -> Iterator[str]:
    def degree(name: str) -> int:
        return values[f"parallelism.{name}_parallel_degree"]

    if degree("pipeline") == 1:
        idle = sorted(path for path in given if path.startswith("parallelism.pipeline_parallel_"))
        if idle:
            yield f"{', '.join(idle)} has no effect: there is one stage"
    elif not values["parallelism.module_fqns_per_model_part"]:
        num_layers = model.model.num_layers
        stages = layers_on_stages(values, num_layers=num_layers)
        if stages != layers_per_stage(num_layers, len(stages)):
            counts = ", ".join(map(str, stages))
            yield f"torchtitan's stages have {counts} layers, which parallel.layers_per_stage can express"
    if degree("expert") > 1 and model.model.experts is None:
        yield f"parallelism.expert_parallel_degree = {degree('expert')} has no effect: the model has no experts"
    if degree("tensor") == 1 and values["compile.enable_async_tensor_parallel"]:
        yield "compile.enable_async_tensor_parallel has no effect: parallelism.tensor_parallel_degree is 1"
    if degree("tensor") == 1 and not values["parallelism.enable_sequence_parallel"]:
        yield "parallelism.enable_sequence_parallel has no effect: parallelism.tensor_parallel_degree is 1"


def _learning_rates(values: Mapping[str, Any]) -> Iterator[str]:
    steps, warmup, ratio = (
        values["training.steps"],
        values["lr_scheduler.warmup_steps"],
        values["lr_scheduler.decay_ratio"],
    )
    if warmup > steps:
        yield f"lr_scheduler.warmup_steps = {warmup} is more than training.steps = {steps}: the peak is not reached"
    elif ratio is not None and warmup + round(steps * ratio) > steps and "lr_scheduler.schedule" not in values:
        yield f"lr_scheduler.decay_ratio = {ratio} begins within the warm-up of {warmup} steps"
