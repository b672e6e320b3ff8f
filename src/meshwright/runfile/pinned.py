"""A pinned plan and the `parallel` section of a run file: each from the other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshwright.cost.pipeline.schedules import usual_schedule
from meshwright.runfile import schema
from meshwright.specs.plan import AxisOrder, Offload, Plan, Recompute, Sharding

_ALWAYS = ("data_shard", "data_replicate", "tensor", "context", "pipeline", "sharding")
_WORTH_SAYING = ("sequence_parallel", "virtual_pipeline", "layers_per_stage", "expert", "expert_tensor")
_DEFAULT_MODULES = ("core_attention",)  # the first thing that every framework's selective mode drops


def plan_from_section(section: schema.ParallelSection, *, data_shard: int, micro_batch: int) -> Plan:
    """The plan that a `parallel` section pins.

    An omitted schedule is 1F1B, or interleaved where there are virtual stages.
    """
    recompute, modules, layers = _recompute(section.recompute)
    alike = {f.name: getattr(section, f.name) for f in fields(Plan) if hasattr(section, f.name)}
    return Plan(
        **alike | {
            "data_shard": data_shard, "micro_batch": micro_batch, "sharding": Sharding[section.sharding.upper()],
            "schedule": section.schedule or usual_schedule(section.virtual_pipeline), "recompute": recompute,
            "recompute_modules": modules, "recompute_layers": layers,
        }
    )  # fmt: skip


def section_from_plan(plan: Plan) -> dict[str, Any]:
    """The `parallel` section that pins `plan`: degrees and sharding always, the rest if unusual."""
    usual = {f.name: f.default for f in fields(Plan)}
    section: dict[str, Any] = {name: getattr(plan, name) for name in _ALWAYS}
    section["sharding"] = plan.sharding.name.lower()
    section |= {n: getattr(plan, n) for n in _WORTH_SAYING if getattr(plan, n) != usual[n]}
    if plan.layers_per_stage is not None:
        section["layers_per_stage"] = list(plan.layers_per_stage)
    if plan.pipeline > 1 or plan.schedule is not usual_schedule(plan.virtual_pipeline):
        section["schedule"] = plan.schedule.value
    section["recompute"] = _recompute_word(plan)
    if plan.offload is not Offload.NONE:
        section["offload"] = plan.offload.value
    if plan.axis_order is not AxisOrder.PIPELINE_OUTERMOST:
        section["axis_order"] = plan.axis_order.value
    return section


def _recompute(given: str | schema.RecomputeSection) -> tuple[Recompute, tuple[str, ...], int | None]:
    if isinstance(given, str):
        kind = Recompute(given)
        return kind, _DEFAULT_MODULES if kind is Recompute.SELECTIVE else (), None
    if given.modules is not None:
        return Recompute.SELECTIVE, given.modules, None
    return Recompute.FULL, (), given.layers


def _recompute_word(plan: Plan) -> str | dict[str, Any]:
    if plan.recompute is Recompute.SELECTIVE:
        return {"modules": list(plan.recompute_modules)}
    if plan.recompute is Recompute.FULL and plan.recompute_layers is not None:
        return {"layers": plan.recompute_layers}
    return plan.recompute.value
