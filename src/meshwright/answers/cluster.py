"""Sentences and JSON about the hardware and the switches of software that a run has instead of the usual."""

from __future__ import annotations

from typing import Any

from meshwright.planner.request import PlanRequest
from meshwright.planner.switches import software_lines
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan


def hardware_line(cluster: Cluster) -> str | None:
    """Return the sentence on hardware that the run states in place of the catalogue's; None where it states none."""
    return f"hardware: {', '.join(cluster.stated)}" if cluster.stated else None


def setup_lines(request: PlanRequest, plan: Plan) -> list[str]:
    """Return a sentence each on unusual hardware and on unusual software that changes something of `plan`."""
    hardware = hardware_line(request.cluster)
    return [*([] if hardware is None else [hardware]), *software_lines(request, plan)]


def hardware_document(cluster: Cluster) -> dict[str, Any]:
    """Return the network and the memory of a device, as the cost model has them; rates are one direction."""
    fabric = cluster.fabric
    return {
        "stated": list(cluster.stated),
        "fabric": fabric.name,
        "scale_out_bytes_per_s": fabric.scale_out_bytes_per_s,
        "scale_out_latency_s": fabric.scale_out_latency_s,
        "oversubscription": fabric.oversubscription,
        "memory_bytes": cluster.accelerator.memory_bytes,
    }
