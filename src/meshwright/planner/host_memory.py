"""Host memory that a plan needs: tensors of each device that lie there between their uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.tables import plan_row
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.specs.plan import Offload, Plan
from meshwright.units import gib


def host_bytes(request: PlanRequest, plan: Plan) -> float:
    """Return the bytes that `plan` keeps in host memory for its fullest device: what that would hold otherwise."""
    features = replace(request.stack.features, offloaded_activations=0.0)
    here = replace(request, stack=replace(request.stack, features=features))
    return _allocated(here, replace(plan, offload=Offload.NONE)) - _allocated(request, plan)


def notes_on_host_memory(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Return a note on the host memory that `plan` needs, if it needs any. The catalogue knows no host's size."""
    if plan.offload is Offload.NONE and not request.stack.features.offloaded_activations:
        return ()
    size = gib(host_bytes(request, plan))
    return (f"the plan keeps {size:.1f} GiB of each device in host memory, whose size the catalogue does not know",)


def _allocated(request: PlanRequest, plan: Plan) -> float:
    return float(np.ravel(cost_model(request).memory(plan_row(plan)).allocated_bytes)[0])
