"""Host memory that a plan needs: tensors of each device that lie there between their uses."""

from __future__ import annotations

from meshwright.arrays import scalar
from meshwright.cost.tables import plan_row
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.specs.plan import Plan
from meshwright.units import gib


def host_bytes(request: PlanRequest, plan: Plan) -> float:
    """Return the bytes that `plan` keeps in host memory for its fullest device: what that would hold otherwise."""
    return scalar(cost_model(request).host_bytes(plan_row(plan)))


def host_shortfall(request: PlanRequest, plan: Plan) -> str | None:
    """Return how much host memory `plan` needs and how much there is; None where that suffices or is not known."""
    num_devices, size = request.cluster.devices_per_node, host_bytes(request, plan)
    if size <= request.usable_host_bytes:
        return None
    node, there = (f"{gib(num_devices * each):,.1f}" for each in (size, request.cluster.host_bytes_per_device or 0.0))
    return (
        f"host memory: {plan.describe()} keeps {gib(size):.1f} GiB of each device there, {node} GiB of a node's "
        f"{num_devices}; a host has {there} GiB, of which a plan may fill "
        f"{gib(num_devices * request.usable_host_bytes):,.1f}"
    )


LARGER_HOST = "hosts with more memory: --set cluster.host_memory=SIZE"


def notes_on_host_memory(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Return a note on the host memory that `plan` needs, if it needs any."""
    size, num_devices = host_bytes(request, plan), request.cluster.devices_per_node
    if not size:
        return ()
    known = request.cluster.host_bytes_per_device
    there = "whose size is not known: cluster.host_memory states it" if known is None else (
        f"{gib(num_devices * size):,.1f} of the {gib(num_devices * known):,.1f} GiB of a host"
    )  # fmt: skip
    return (f"the plan keeps {gib(size):.1f} GiB of each device in host memory, {there}",)
