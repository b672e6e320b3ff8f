"""Notes on a plan: what of its model is not calibrated, and a network that it does not use; of clusters of several
generations the part that binds, and the pace of the same plan on each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.catalog.clusters import with_nodes
from meshwright.catalog.engines import engine_names
from meshwright.catalog.joint_clusters import slowest_part, smallest_part
from meshwright.catalog.stacks import features_of, notes_on_framework
from meshwright.cost.context_heads import has_scans
from meshwright.errors import MeshwrightError
from meshwright.planner.engines import engine_facts
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.generations import PartShare, mixed_step
from meshwright.planner.request import PlanRequest
from meshwright.specs.features import Preset
from meshwright.specs.hardware import Cluster
from meshwright.specs.model_parts import uncalibrated
from meshwright.specs.plan import Plan
from meshwright.units import gib, ms


def notes_on_parts(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Sentences about the request's model under `plan`, and about the parts of its cluster."""
    known = (
        *uncalibrated(request.model),
        *_on_scans(request, plan),
        *_on_idle_network(request.cluster),
        *_on_agreed(request),
        *_on_software(request),
    )
    parts = request.cluster.parts
    if not parts:
        return known
    mixed = mixed_step(request, plan)
    binding = (_ranks(mixed.shares), *_who_runs(request, plan)) if mixed else _equal_shares(request)
    own = parts if request.cluster.is_mixed else ()
    return (*known, *_on_nodes(request), *binding, *(_of_one_part(request, plan, part) for part in own))


def _on_nodes(request: PlanRequest) -> tuple[str, ...]:
    """A note on nodes of several sizes."""
    cluster = request.cluster
    if len(cluster.node_sizes) == 1:
        return ()
    sizes = " and ".join(map(str, cluster.node_sizes))
    domain = cluster.fabric.scale_up_domain
    return (
        f"nodes have {sizes} devices: groups of up to {domain} neighbours lie inside every node, whatever its size; "
        f"larger ones, and collectives over all nodes, are costed as if every node had {cluster.devices_per_node}",
    )


def _on_idle_network(cluster: Cluster) -> tuple[str, ...]:
    """A note on a network that the run states where scale-up links join all devices."""
    if not cluster.states_network or cluster.num_devices > cluster.fabric.scale_up_domain:
        return ()
    return (
        f"the network that the run states changes nothing: scale-up links join all {cluster.num_devices} devices of "
        f"{cluster.name}",
    )


def _on_software(request: PlanRequest) -> tuple[str, ...]:
    """A note on a framework that the engine is not."""
    vendor = request.cluster.accelerator.vendor
    return notes_on_framework(request.engine, request.stack, vendor=vendor)


def _on_agreed(request: PlanRequest) -> tuple[str, ...]:
    """A note on switches that the engine has in place of a recipe's, which do not run together."""
    if request.model.experts is None:
        return ()
    facts, stack, device = engine_facts(request.engine), request.stack, request.cluster.accelerator
    recipe = replace(stack, preset=facts.preset(request.model, Preset.RECIPE, device))
    theirs = features_of(recipe, device, precision=request.precision.name)
    agreed = facts.agreed(stack.features, theirs)
    if not agreed.stated() or stack.preset != agreed.or_else(recipe.preset):
        return ()
    said = ", ".join(f"stack.{name}={str(value).lower()}" for name, value in agreed.stated().items())
    also = ", ".join(str(getattr(theirs, name)).lower() for name in agreed.stated())
    return (
        f"{said}: the recipe of {stack.framework} has {also}, which {facts.title} does not run with the other switches",
    )


def _on_scans(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    if plan.context == 1 or not has_scans(request.model_table):
        return ()
    return (
        "context ranks swap sequence for heads around scans, as Megatron-Core does; this is counted and not "
        "calibrated: no published step has it",
    )


def _equal_shares(request: PlanRequest) -> tuple[str, ...]:
    parts = request.cluster.parts
    if not request.cluster.is_mixed:
        return ()
    slowest, smallest = slowest_part(parts), smallest_part(parts)
    memory = gib(smallest.accelerator.memory_bytes)
    return (
        f"every rank has an equal share of batch and layers: {slowest.name} sets the pace, and the {memory:.1f} GiB "
        f"of {smallest.name} are the limit of memory. Replicas with unequal numbers of micro-batches are not "
        "estimated: no engine here runs them",
    )


def _ranks(shares: Sequence[PartShare]) -> str:
    """Pipeline ranks, layers, time and memory of each part."""
    return "each pipeline rank lies on one part: " + "; ".join(
        f"{share.part.name} has {_named(share.ranks)} with "
        f"{_counts(share.layers)} layers, {ms(share.rank_s):.0f} ms a micro-batch at most, "
        f"{gib(share.reserved_bytes):.1f} of {gib(share.budget.usable_bytes):.1f} GiB"
        for share in shares
    )


def _named(ranks: Sequence[int]) -> str:
    """
    >>> _named([0]), _named([2, 3])
    ('rank 1', 'ranks 3 to 4')
    """
    return f"rank {ranks[0] + 1}" if len(ranks) == 1 else f"ranks {ranks[0] + 1} to {ranks[-1] + 1}"


def _counts(layers: Sequence[int]) -> str:
    return str(layers[0]) if len({*layers}) == 1 else ", ".join(map(str, layers))


def _who_runs(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """The engines that take a split of layers, and the order of hosts that it needs."""
    names = [name for name in engine_names() if engine_facts(name).uneven_layers]
    split = f"layers_per_stage is run by {', '.join(names)}; " if plan.layers_per_stage else ""
    return (f"{split}the hosts of {request.cluster.parts[0].name} come first in the order of ranks",)


def _of_one_part(request: PlanRequest, plan: Plan, part: Cluster) -> str:
    """Step time of `plan` on a cluster that has only the devices of `part`."""
    alike = with_nodes(part, -(-request.num_devices // part.devices_per_node))
    if alike.num_devices != request.num_devices:
        return f"no whole nodes of {part.devices_per_node} have {request.num_devices} devices of {part.name}"
    try:
        whole = estimate_plan(replace(request, cluster=alike), plan).step.step
    except MeshwrightError as error:
        return f"on {alike.name} the same plan is not estimated: {error}"
    return f"on {alike.name} the same plan would take {whole.value:.3g} s a step"
