"""Notes on clusters of several generations: the part that binds, and the pace of the same plan on each part."""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.clusters import cluster
from meshwright.catalog.joint_clusters import slowest_part, smallest_part
from meshwright.errors import MeshwrightError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan
from meshwright.units import gib


def notes_on_parts(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Sentences about the parts of the request's cluster under `plan`; () for a cluster of one part."""
    parts = request.cluster.parts
    if not parts:
        return ()
    slowest, smallest = slowest_part(parts), smallest_part(parts)
    memory = gib(smallest.accelerator.memory_bytes)
    return (
        f"every rank has an equal share of batch and layers: {slowest.name} sets the pace, and the {memory:.1f} GiB "
        f"of {smallest.name} are the limit of memory; shares in proportion to speed are not estimated",
        *(_of_one_part(request, plan, part) for part in parts),
    )


def _of_one_part(request: PlanRequest, plan: Plan, part: Cluster) -> str:
    """Step time of `plan` if all devices were those of `part`."""
    device, per_node = part.accelerator.name, part.devices_per_node
    alike = f"{device}-{per_node}x{request.cluster.num_nodes}"
    try:
        whole = estimate_plan(replace(request, cluster=cluster(alike)), plan).step.step
    except MeshwrightError as error:
        return f"on {alike} the same plan is not estimated: {error}"
    return f"on {alike} the same plan would take {whole.value:.3g} s a step"
