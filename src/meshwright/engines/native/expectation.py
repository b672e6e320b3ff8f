"""Prediction of a run on this machine, from a quick measurement by the processes that will train it.

    cluster: here     device rates, one layer of the model and, with several processes, one collective are measured
                      (`machine_measurement`) and replace what calibration assumes of an unknown machine. An installed
                      calibration of this CPU knows the collectives already
    a calibration     of this CPU: a few of its steps are timed again (`speed`). What is predicted is scaled to the
                      machine as it is now, and the interval holds the machine as it was too
    a named cluster   the catalogue's device under the shipped calibration: nothing is measured

While other programs use the processors, the step is predicted as they leave it: a load is taken to last, and the
interval is wider by what loads change from one minute to the next. A note says what an idle machine would take.

All processes call `measure_expectation` together and get the same result.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from math import exp, hypot, log
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from meshwright import runfile
from meshwright.calibration.device import Check, DeviceCalibration, installed_path, load
from meshwright.cost.uncertainty import Z80
from meshwright.engines.base import Measuring
from meshwright.engines.base import predicted as predicted_of
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.fp8 import is_emulated
from meshwright.engines.native.layer_timing import LEAST_SD
from meshwright.engines.native.machine_measurement import MachineMeasurement, measure_machine
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.errors import MeshwrightError
from meshwright.fitting.kernel_times import calibration_here
from meshwright.kernels import processor
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest, is_processor, note_on_labels, request_for
from meshwright.records.training import predicted_text
from meshwright.specs.hardware import HERE
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run, with_label_ratio
from meshwright.training import device as devices
from meshwright.training.cpu_libraries import WAIT_POLICY
from meshwright.training.host_load import HostLoad
from meshwright.training.metrics import Yardstick, yardstick
from meshwright.training.processes import is_several, reduced
from meshwright.units import format_seconds

RATES = ("tokens_per_s_per_device", "mfu")
"""Rates of a prediction, beside its step."""
LOAD_SD = 0.4
"""Of the logarithm of a step that a load makes many times as long: loads change from one minute to the next. An
assumption; docs/log.md has predictions under loads beside what was measured."""
OF_PUBLISHED_RUNS = (
    "nothing could be timed on this machine: the prediction is a range from published runs on accelerators, and is not "
    "of this machine"
)
NOTABLY = 1.1
"""Smallest ratio of speeds that is reported: speeds of any two minutes differ by less."""
CHECK_BUDGET_S = 0.4
"""For each step of a calibration that is timed again."""
FEWEST_CHECKS = 3  # repetitions of it


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The prediction of a run, and the yardstick that converts its step times."""

    yardstick: Yardstick
    predicted: dict[str, Any] | None  # None: the planner has no model of this device
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()  # those of the notes that are said with the prediction

    def holding(self, more_bytes: int) -> Expectation:
        """The expectation of a process on a CPU that holds `more_bytes` more than when it was predicted."""
        if self.predicted is None or more_bytes <= 0:
            return self
        memory_bytes = self.predicted["memory_bytes"] + more_bytes
        return replace(self, predicted={**self.predicted, "memory_bytes": memory_bytes})

    def lines(self) -> list[str]:
        """Lines for the reader of the progress."""
        convention = f"MFU: {self.yardstick.convention}"
        if self.predicted is None:
            return [convention]
        step, rate = (predicted_text(self.predicted, name) for name in ("step", "tokens_per_s_per_device"))
        line = f"expected: {step} a step, {rate} tokens/s/device; 80 % intervals"
        return [line, *(f"note: {text}" for text in self.cautions), convention]


def measure_expectation(
    run: Run,
    *,
    plan: Plan,
    device: torch.device,
    measuring: Measuring = Measuring.ONCE,
    label_ratio: float | None = None,
) -> Expectation:
    """Predict `plan`. Raises no error of the prediction: without one a note says why.

    `label_ratio`: labels over tokens of the run's data, on which the steps of `batch.label_tokens` depend.
    """
    held_bytes = devices.resident_bytes()
    steps = with_label_ratio(run, 1.0 if label_ratio is None else label_ratio)
    found = _of_fixed_steps(steps, plan=plan, device=device, measuring=measuring)
    is_here = run.cluster is None or is_processor(run.cluster.accelerator)
    if found.predicted is not None and device.type == "cpu" and is_here:
        memory_bytes = max(devices.peak_memory_bytes(device), held_bytes + found.predicted["memory_bytes"])
        found = replace(found, predicted={**found.predicted, "memory_bytes": memory_bytes})
    return replace(found, notes=(*note_on_labels(run, ratio=label_ratio), *found.notes))


def _of_fixed_steps(run: Run, *, plan: Plan, device: torch.device, measuring: Measuring) -> Expectation:
    if is_emulated(run.precision, device=device):
        held = yardstick(run, accelerator=None, plan=plan)
        note = f"nothing was predicted: this device emulates {run.precision.name}"
        return Expectation(yardstick=held, predicted=None, notes=(note,))
    if run.cluster is None:
        return _of_this_machine(run, plan=plan, device=device, measuring=measuring)
    held = yardstick(run, accelerator=run.cluster.accelerator, plan=plan)
    if plan.num_devices > run.cluster.num_devices:
        note = f"{plan.num_devices} processes on {run.cluster.num_devices} devices: nothing was predicted"
        return Expectation(yardstick=held, predicted=None, notes=(note,))
    notes: list[str] = []
    try:
        predicted = _predicted(request_for(run), plan, device)
        slower = None if measuring is Measuring.NEVER else _slowness(run, plan, device)
        if slower is not None:
            predicted = _at_speed(predicted, slower)
            notes += _speed_notes(slower)
    except MeshwrightError as error:
        predicted = None
        notes.append(f"nothing was predicted: {error}")
    return Expectation(yardstick=held, predicted=predicted, notes=tuple(notes))


def _of_this_machine(run: Run, *, plan: Plan, device: torch.device, measuring: Measuring) -> Expectation:
    """The expectation of `cluster: here`."""
    installed = _installed(device) if is_several() else None
    found = measure_machine(
        run, plan=plan, device=device, measuring=measuring,
        needs_collective=is_several() and installed is None,
    )  # fmt: skip
    cluster = devices.cluster_here(device, num_devices=plan.num_devices, rates=found.rates)
    is_known = found.rates is not None or devices.catalog_name(device) is not None
    held = yardstick(run, accelerator=cluster.accelerator if is_known else None, plan=plan)
    notes, cautions = [*found.notes], list[str]()
    if not is_known:
        return Expectation(yardstick=held, predicted=None, notes=(*notes, "nothing was predicted"))
    predicted = None
    try:
        request = request_for(replace(run, cluster=cluster))
        if found.times is not None:
            known = found if found.load is None else replace(found, times=replace(found.times, sd=LEAST_SD))
            request = _calibrated(request, known, installed, plan)
            notes.append(f"prediction: {found.made}")
        predicted = _predicted(request, plan, device)
        if found.times is None and device.type == "cpu":
            predicted = _as_range(predicted)
            cautions.append(OF_PUBLISHED_RUNS)
        elif found.times is None:
            notes.append("prediction: from published runs")
        if found.load is not None:
            predicted, more = _under_load(predicted, found, found.load)
            cautions += more
    except MeshwrightError as error:
        notes.append(f"nothing was predicted: {error}")
    return Expectation(yardstick=held, predicted=predicted, notes=(*notes, *cautions), cautions=tuple(cautions))


def _as_range(predicted: dict[str, Any]) -> dict[str, Any]:
    """A prediction from published runs of accelerators for a CPU: a range without a value that is better than others.

    It reaches down to a step at the GEMM rate measured here (an MFU of 1): no step of published runs is faster.
    """
    ratio = min(1.0, predicted["mfu"]["value"])
    step = predicted["step"] | {"low": min(predicted["step"]["low"], predicted["step"]["value"] * ratio)}
    of_rates = {n: predicted[n] | {"high": max(predicted[n]["high"], predicted[n]["value"] / ratio)} for n in RATES}
    return {**predicted, **of_rates, "step": step, "is_range": True}


def _under_load(
    predicted: dict[str, Any], found: MachineMeasurement, load: HostLoad
) -> tuple[dict[str, Any], list[str]]:
    """`predicted` as other programs leave it, and what to say about it.

    What was measured was measured under the load. Published runs know none: their range reaches the step that is left
    the share of the processors found.
    """
    num_threads = torch.get_num_threads() * (dist.get_world_size() if dist.is_initialized() else 1)
    slower = load.slowdown(num_threads=num_threads)  # of all processes
    if found.times is None:
        caution = f"{load.text}: the range reaches a step that takes {slower:.1f} times as long"
        return _widened(predicted, up=slower), [caution]
    slower = max(slower, found.times.slowdown)
    spread = exp(Z80 * hypot(found.times.sd, LOAD_SD * (1 - 1 / slower)))
    idle = format_seconds(predicted["step"]["value"] / slower)
    caution = (
        f"this machine is busy: {load.text} while it was measured. The prediction is for a machine that stays as busy; "
        f"idle, a step would take about {idle}. GEMMs were as slow when they were timed, so an MFU may exceed 100 %. "
        f"The measurement is not kept{_advice()}"
    )
    return _widened(predicted, up=spread, down=spread), [caution]


def _advice() -> str:
    """Words on what makes steps faster beside other programs, unless the user has decided it."""
    if WAIT_POLICY in os.environ or torch.get_num_threads() == 1:
        return ""
    return f". {WAIT_POLICY}=PASSIVE makes steps faster beside other programs, and slower on an idle machine"


def _widened(predicted: dict[str, Any], *, up: float, down: float = 1.0) -> dict[str, Any]:
    """`predicted` with an interval of the step that ends later by the factor `up` and begins earlier by `down`."""
    step = predicted["step"]
    step = step | {"low": step["low"] / down, "high": step["high"] * up}
    of_rates = {n: predicted[n] | {"low": predicted[n]["low"] / up, "high": predicted[n]["high"] * down} for n in RATES}
    return {**predicted, **of_rates, "step": step}


def _calibrated(
    request: PlanRequest, found: MachineMeasurement, installed: DeviceCalibration | None, plan: Plan
) -> PlanRequest:
    """`request` with a calibration in which the model gives the measured times."""
    assert found.times is not None
    collective = found.collective
    if installed is not None:
        collective = None
        request = replace(request, calibration=installed.calibration(num_devices=plan.num_devices))
    plain = replace(request, preference=None, grpo=None)  # as the layers were timed
    calibration = calibration_here(plain, found.times, collective=collective, made=found.made)
    return replace(request, calibration=calibration)


def _installed(device: torch.device) -> DeviceCalibration | None:
    """The user's installed calibration, if it is of this CPU: it includes collectives."""
    path = installed_path()
    if device.type != "cpu" or not path.is_file():
        return None
    found = load(path)
    return found if found.shares_host and found.accelerator.name == devices.device_name(device) else None


def _predicted(request: PlanRequest, plan: Plan, device: torch.device) -> dict[str, Any]:
    """The prediction. On a CPU the memory of what the process holds already, its libraries, is not in it."""
    if device.type == "cpu" and processor.HERE.has_amx:  # PyTorch's attention is faster there, and chosen
        routes = {"attention": "sdpa", **request.kernels.routes}
        request = replace(request, kernels=replace(request.kernels, routes=routes))
    estimate = estimate_plan(request, plan)
    memory_bytes = estimate.step.memory.reserved_bytes
    return {**predicted_of(estimate, memory_bytes=memory_bytes), "slower_than_calibrated": None, "is_range": False}


def _slowness(run: Run, plan: Plan, device: torch.device) -> float | None:
    """Ratio of the step time now to that of the run's calibration; None without one of this CPU, or where not all
    processes of the plan are here to take the steps."""
    if run.calibration is None or run.cluster_name != HERE or device.type != "cpu":
        return None
    if plan.num_devices != (dist.get_world_size() if dist.is_initialized() else 1):
        return None
    if is_several():
        dist.barrier()
    checks = load(run.calibration).checks
    return measure_slowdown(checks, num_processes=plan.num_devices, device=device)


def _at_speed(predicted: dict[str, Any], slower: float) -> dict[str, Any]:
    """`predicted` for a machine that is `slower` times as slow now. The machine may recover at any time, so intervals
    include the speed of the calibration."""
    of_rates = {name: _scaled(predicted[name], 1 / slower) for name in RATES}
    components_s = {name: seconds * slower for name, seconds in predicted["components_s"].items()}
    return {
        **predicted,
        **of_rates,
        "step": _scaled(predicted["step"], slower),
        "components_s": components_s,
        "slower_than_calibrated": slower,
    }


def _scaled(estimate: dict[str, Any], factor: float) -> dict[str, Any]:
    return {
        **estimate,
        "value": estimate["value"] * factor,
        "low": estimate["low"] * min(factor, 1.0),
        "high": estimate["high"] * max(factor, 1.0),
    }


def _speed_notes(slower: float) -> list[str]:
    if 1 / NOTABLY < slower < NOTABLY:
        return []
    word = "slower" if slower > 1 else "faster"
    return [
        f"this machine is {abs(slower - 1):.0%} {word} now than when it was calibrated: so is the prediction, and "
        f"its interval holds both"
    ]


def measure_slowdown(checks: tuple[Check, ...], *, num_processes: int, device: torch.device) -> float | None:
    """Ratio of step times now to those of the calibration; None where it has no step of so many processes.

    A calibration keeps small steps that were timed with it, by numbers of processes. The processes of a training take
    them at the same time, each by itself, as in the calibration, in about a second. All get the same result, that of
    the slowest of them.
    """
    alike = [check for check in checks if check.num_processes == num_processes]
    return exp(mean(log(_seconds(check, device) / check.seconds) for check in alike)) if alike else None


def _seconds(check: Check, device: torch.device) -> float:
    run = runfile.loads(check.run)
    assert run.micro_batch is not None
    with torch.random.fork_rng():
        parts = assemble(run, coordinates=MeshCoordinates(plan=Plan(micro_batch=run.micro_batch), device=device))
        tokens_BT = torch.randint(run.model.vocab, (run.global_batch, run.sequence_length), device=device)
    positions_BT = torch.arange(run.sequence_length, device=device).expand(tokens_BT.shape)
    batch = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1), "positions_BT": positions_BT}

    def step_s() -> float:
        devices.synchronize(device)
        start_s = time.perf_counter()
        parts.stepper.forward_backward(batch, scale=1.0 / tokens_BT.numel())
        parts.optimizer.step(learning_rate=0.0)
        devices.synchronize(device)
        return reduced(time.perf_counter() - start_s)[0]

    step_s(), step_s()
    seconds: list[float] = []
    while len(seconds) < FEWEST_CHECKS or sum(seconds) < CHECK_BUDGET_S:
        seconds.append(step_s())
    return median(seconds)
