"""What the planner expects of a run here, from a quick measurement by the processes that will train it.

    cluster: here     device rates, one layer of the model and, with several processes, one exchange are measured
                      (`device`, `probe`); they take the place of what calibration believes of an unknown machine
    a named cluster   the catalogue's device under the shipped calibration: nothing is measured

All processes call `expect` together and get the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engines.base import interval
from meshwright.engines.metrics import Yardstick, yardstick
from meshwright.engines.native import device as devices
from meshwright.engines.native.device import Rates
from meshwright.engines.native.probe import measure_exchange, measure_kernels, slowest
from meshwright.errors import MeshwrightError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.implied import calibration_here
from meshwright.planner.request import PlanRequest, request_for
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

MEASURED_HERE = "one layer of the model was timed on this machine just before the run"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to hold measurements against."""

    yardstick: Yardstick
    predicted: dict[str, Any] | None  # None: the planner has no model of this device
    notes: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """What to expect, for people."""
        convention = f"MFU: {self.yardstick.convention}"
        if self.predicted is None:
            return [convention]
        step, rate = interval(self.predicted["step"]), interval(self.predicted["tokens_per_s_per_device"])
        return [f"expected: {step} a step, {rate} tokens/s/device; 80 % intervals", convention]


def expect(run: Run, *, plan: Plan, device: torch.device) -> Expectation:
    """What `plan` will give. Raises nothing that has to do with the prediction: without one a note says why."""
    cluster = run.cluster or _measured_cluster(plan, device)
    held = yardstick(run, accelerator=cluster.accelerator, plan=plan)
    if plan.num_devices > cluster.num_devices:
        note = f"{plan.num_devices} processes on {cluster.num_devices} devices: nothing was predicted"
        return Expectation(yardstick=held, predicted=None, notes=(note,))
    notes = []
    try:
        request = request_for(replace(run, cluster=cluster))
        if run.cluster is None:
            try:
                request = _calibrated(request, run, plan, device)
                notes.append(f"prediction: {MEASURED_HERE}")
            except torch.OutOfMemoryError:
                notes.append("prediction: there was no room to time a layer, so that of published runs")
            devices.forget_memory(device)
        predicted = _predicted(request, plan, device)
    except MeshwrightError as error:
        predicted = None
        notes.append(f"nothing was predicted: {error}")
    return Expectation(yardstick=held, predicted=predicted, notes=tuple(notes))


def _measured_cluster(plan: Plan, device: torch.device) -> Cluster:
    """This machine, with the rates of the slowest of its processes while all are measured."""
    if devices.known_name(device) is not None:
        return devices.cluster_here(device, num_devices=plan.num_devices, rates=None)
    _together()
    rates = devices.measure_rates(device)
    names = list(rates.matmul_flops_per_s)
    values = torch.tensor([*rates.matmul_flops_per_s.values(), rates.copy_bytes_per_s], dtype=torch.float64)
    if _is_several():
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
    *flops, copy = values.tolist()
    rates = Rates(matmul_flops_per_s=dict(zip(names, flops, strict=True)), copy_bytes_per_s=copy)
    return devices.cluster_here(device, num_devices=plan.num_devices, rates=rates)


def _calibrated(request: PlanRequest, run: Run, plan: Plan, device: torch.device) -> PlanRequest:
    _together()
    times = measure_kernels(run, micro_batch=plan.micro_batch, device=device)
    exchange = None
    if _is_several():
        times = slowest(times)
        exchange = slowest(measure_exchange(device))
    return replace(
        request, calibration=calibration_here(request, times, exchange=exchange, made=MEASURED_HERE)
    )


def _predicted(request: PlanRequest, plan: Plan, device: torch.device) -> dict[str, Any]:
    estimate = estimate_plan(request, plan)
    step = estimate.step
    return {
        "step": step.step.as_json(),
        "tokens_per_s_per_device": step.tokens_per_s_per_device.as_json(),
        "mfu": step.mfu.as_json(),
        "memory_bytes": _memory_bytes(step.memory, device),
        "components_s": step.components_s,
        "uncertainty": estimate.uncertainty,
    }


def _memory_bytes(memory: MemoryEstimate, device: torch.device) -> float:
    """What the run will hold at its peak: reserved on a GPU; on a CPU beside what the process holds already, for there
    the workspaces, contexts and communicators of GPUs do not exist."""
    if device.type == "cuda":
        return memory.reserved_bytes
    return devices.resident_bytes() + memory.allocated_bytes - memory.workspace_bytes


def _is_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _together() -> None:
    if _is_several():
        dist.barrier()
