"""One run on another number of devices: the cluster, the batch and the plan that follow.

    replica   the devices that hold the model once: pipeline x lcm(expert x expert_tensor, tensor x context)
    strong    the global batch stays, so each replica's share of it shrinks
    weak      the batch of a replica stays, so the global batch grows

A plan is *widened* by changing its data-parallel width alone. A size that cannot be reached is a sentence
that says why, never an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import gcd, lcm

from meshwright.calibration.parameters import Calibration
from meshwright.catalog.clusters import with_nodes
from meshwright.catalog.joint_clusters import joined
from meshwright.errors import InputError
from meshwright.planner.engines import Severity
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import search
from meshwright.specs.estimate import Estimate
from meshwright.specs.hardware import HERE, Cluster
from meshwright.specs.memory_budget import FitVerdict
from meshwright.specs.plan import Plan
from meshwright.specs.run import Costs
from meshwright.units import gib


class Mode(StrEnum):
    """The global batch when devices are added."""

    STRONG = "strong"  # it stays
    WEAK = "weak"  # it grows with the devices


@dataclass(frozen=True, kw_only=True)
class Study:
    """The question asked at every size.

    `request` is the run at the size its file states; its global batch is for that size. `plan` is kept at
    every size but for its data-parallel width; None: the planner chooses at each. `known` are plans found
    before. `num_tokens`: of the whole training, None if unknown. `load_factor`: tokens of the busiest
    expert rank over the mean.
    """

    request: PlanRequest
    mode: Mode = Mode.STRONG
    plan: Plan | None = None
    known: Mapping[int, Plan] = field(default_factory=dict)
    num_tokens: float | None = None
    costs: Costs = field(default_factory=Costs)
    with_failures: bool = True
    calibration: Calibration | None = None
    load_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Costed:
    """The run on one number of devices, with what it will give there."""

    request: PlanRequest
    estimate: PlanEstimate

    @property
    def num_devices(self) -> int:
        return self.request.num_devices

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.request.global_batch

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def step_s(self) -> float:
        return self.estimate.step.step.value

    @property
    def rate(self) -> Estimate:
        """Tokens per second and device."""
        return self.estimate.step.tokens_per_s_per_device


@dataclass(frozen=True, kw_only=True)
class Unreached:
    """A number of devices on which the run cannot be made, and why."""

    num_devices: int
    global_batch: int
    why_not: str


def resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The cluster with as many nodes as `num_devices` fill, of each part its share; InputError unless they fill them.

    Racks are cut anew: how many devices share a scale-up domain may depend on the size.
    """
    if cluster.name == HERE:
        if num_devices == cluster.num_devices:
            return cluster
        raise InputError(
            "one machine was measured, and no network between such machines",
            got=num_devices, allowed=cluster.num_devices,
            hint="name a cluster of the catalogue, as in --cluster h100-8x4",
        )  # fmt: skip
    if cluster.parts:
        unit = cluster.num_devices // gcd(*(part.num_nodes for part in cluster.parts))
        if num_devices < 1 or num_devices % unit:
            raise InputError(
                "parts of a cluster keep their shares of whole nodes", got=num_devices, allowed=f"multiples of {unit}",
                hint="name parts of other sizes as a cluster: --cluster h100-8x16+h100-4x1",
            )  # fmt: skip
        nodes = [part.num_nodes * num_devices // cluster.num_devices for part in cluster.parts]
        return joined(tuple(map(with_nodes, cluster.parts, nodes)))
    num_nodes, rest = divmod(num_devices, cluster.devices_per_node)
    if rest or num_nodes < 1:
        raise InputError(
            f"{cluster.name} has nodes of {cluster.devices_per_node} devices; a cluster has whole nodes",
            got=num_devices,
            allowed=f"multiples of {cluster.devices_per_node}",
        )
    return with_nodes(cluster, num_nodes)


def replica_devices(plan: Plan) -> int:
    """Devices that hold the model once, whatever data parallelism shards besides.

    >>> replica_devices(Plan(context=4, expert=16, pipeline=24, data_shard=8))
    384
    """
    return plan.pipeline * lcm(plan.expert * plan.expert_tensor, plan.tensor * plan.context)


def widened(plan: Plan, num_devices: int) -> Plan | None:
    """`plan` with the data-parallel width that fills `num_devices`; None unless replicas fill them.

    Where the plan has replicas of a sharded group their number changes, otherwise the width of the sharding.

    >>> widened(Plan(pipeline=4, data_shard=2), 32).data_shard
    8
    """
    if num_devices % replica_devices(plan):
        return None
    data = num_devices // (plan.tensor * plan.context * plan.pipeline)
    if plan.data_replicate == 1:
        return replace(plan, data_shard=data)
    return replace(plan, data_replicate=data // plan.data_shard) if data % plan.data_shard == 0 else None


def request_at(study: Study, num_devices: int) -> PlanRequest | Unreached:
    """The study's question on `num_devices`. Raises InputError unless they are whole nodes."""
    cluster = resized(study.request.cluster, num_devices)
    batch = study.request.global_batch
    if study.mode is Mode.WEAK:
        batch, rest = divmod(batch * num_devices, study.request.num_devices)
        if rest or not batch:
            why_not = "the share of the global batch is no whole number of sequences"
            return Unreached(num_devices=num_devices, global_batch=batch, why_not=why_not)
    return replace(study.request, cluster=cluster, global_batch=batch)


def at_size(study: Study, num_devices: int) -> Costed | Unreached:
    """Cost the run on `num_devices`. Raises InputError unless they are whole nodes."""
    request = request_at(study, num_devices)
    return request if isinstance(request, Unreached) else costed(study, request)


def costed(study: Study, request: PlanRequest) -> Costed | Unreached:
    """Cost `request` with the plan known for its size, else the study's widened, else the planner's best."""
    found = study.known.get(request.num_devices) or _plan_for(study, request)
    why_not = found if isinstance(found, str) else _refusal(request, found)
    if isinstance(found, Plan) and not why_not:
        estimate = estimate_plan(request, found, calibration=study.calibration, load_factor=study.load_factor)
        memory = estimate.step.memory
        if memory.verdict is not FitVerdict.DOES_NOT_FIT:
            return Costed(request=request, estimate=estimate)
        needed, there = gib(memory.reserved_bytes), gib(memory.usable_bytes)
        why_not = f"needs {needed:.0f} GiB a device, a plan may reserve {there:.0f}"
    return Unreached(num_devices=request.num_devices, global_batch=request.global_batch, why_not=why_not)


def _refusal(request: PlanRequest, plan: Plan) -> str:
    """The first rule of the engine that `plan` breaks; empty when it is legal."""
    broken = violations(plan, context=legality_context(request))
    return next((str(v) for v in broken if v.severity is Severity.REFUSED), "")


def _plan_for(study: Study, request: PlanRequest) -> Plan | str:
    if study.plan is not None:
        replica = replica_devices(study.plan)
        wide = widened(study.plan, request.num_devices)
        return wide or f"{request.num_devices:,} devices are no whole number of replicas of {replica}"
    result = search(request, top=1)
    return explain_infeasible(result).binding if result.best is None else result.best.plan
