"""Torchtitan's assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.engines.torchtitan import lower
from meshwright.errors import InputError

SCHEDULES = {name.lower(): schedule.value for schedule, name in lower.SCHEDULES.items()} | {"dualpipev": "dualpipe"}
TWO_CHUNKS = ("interleaved", "zbv", "dualpipe")  # schedules with two virtual stages per rank by default


def schedule_of(values: Mapping[str, Any]) -> str:
    """Return the pipeline's schedule by its name in a run file."""
    name = values["parallelism.pipeline_parallel_schedule"]
    if name.lower() not in SCHEDULES:
        raise InputError("a schedule that run files do not have", got=name, allowed=", ".join(SCHEDULES))
    return SCHEDULES[name.lower()]


def layers_on_stages(values: Mapping[str, Any], *, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage.

    The embedding counts as layers of the first stage and the head as layers of the last (one each by default). Raises
    InputError for what torchtitan refuses.
    """
    modules = values["parallelism.module_fqns_per_model_part"]
    if modules:
        return tuple(sum(name.startswith("layers.") for name in stage) for stage in modules)
    pipeline = values["parallelism.pipeline_parallel_degree"]
    ends = [values[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")]
    most, counted = values["parallelism.pipeline_parallel_layers_per_stage"], num_layers + sum(ends)
    num_stages = -(-counted // most) if most else pipeline * (1 + (schedule_of(values) in TWO_CHUNKS))
    if num_stages % pipeline or num_stages > counted or max(ends) > counted // num_stages:
        raise InputError(
            "layers cannot be split over the stages",
            got=f"{num_layers} layers and {sum(ends)} for the ends on {num_stages} stages of {pipeline} ranks",
        )
    layers = [counted // num_stages + (k < counted % num_stages) for k in range(num_stages)]
    layers[0] -= ends[0]
    layers[-1] -= ends[1]
    return tuple(layers)
