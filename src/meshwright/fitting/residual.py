"""Fit of the parameters that only whole training steps show: the residual that the kernels do not explain.

    minimise  Σ_steps rho(log predicted - log measured)  +  Σ_parameters ((log parameter - log prior) / prior sd)^2

Isolated kernels and collectives do not include the work of a process between them, nor the contention of processes on
one host. Both are a handful of parameters of the cost model. They start at the values of the kernels, and Gauss-Newton
fits them to the measured steps. rho is Cauchy's loss, which gives little weight to a disturbed step. The
error comes from leave-one-out over steps, in its linear approximation (Cook and Weisberg 1982, "Residuals and
influence in regression", section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration.device import DeviceCalibration, Kernels
from meshwright.calibration.parameters import MeasuredParameter, prior
from meshwright.cost.rates import SystemRates, system_rates
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.cost.uncertainty import Z80
from meshwright.records.device import FEWEST_SAMPLES, Z95, DeviceRow
from meshwright.records.steps import plan_of, run_of
from meshwright.specs.precision import Precision
from meshwright.specs.run import Run

Floats = NDArray[np.float64]

FEWEST_STEPS = 8
LEAST_NOISE = 0.03
"""Standard deviation of the logarithm of a step between two processes: no step is known better."""
FEW_NOISE = 0.08
"""Standard deviation with too few repetitions for an interval. Steps repeat better than kernels."""
LARGEST_SHARE = 0.999
"""Upper bound of a fitted parameter that is a share."""
MAX_LEVERAGE = 0.9
"""A step of more leverage counts with this much: the linear approximation of leave-one-out fails there."""
DAMPING = 1e-2
CAUCHY = 2.0
ITERATIONS = 12
TOLERANCE = 1e-3
"""The fit ends with a step that lowers the objective, -2 log(posterior density), by less."""
DERIVATIVE_STEP = 0.02
COVERED = 0.8  # share of steps that an interval holds, each predicted without it


@dataclass(frozen=True, kw_only=True)
class Free:
    """A fitted parameter: its start and prior standard deviation. Both are assumptions."""

    start: float
    sd: float  # of its logarithm


ANYWHERE = {"general_factor": Free(start=1.0, sd=0.2), "step_s": Free(start=1e-3, sd=1.0)}
KERNELS = ("elementwise_factor", "optimizer_passes", "attention_forward_ratio", "attention_backward_ratio")
"""Measured in isolation. They start at the measured values."""
KERNELS_SD = 0.6
ON_HOST = ANYWHERE | {
    "general_factor": Free(start=1.0, sd=0.1),
    "elementwise_kernels": Free(start=prior().parameters["elementwise_kernels"].prior, sd=1.0),
    "head_factor": Free(start=1.0, sd=0.3),
    "accumulation_passes": Free(start=1.0, sd=0.5),
}
"""On a CPU, which launches each operation itself."""
COLLECTIVES = {
    "data": {"data_collective_s": Free(start=3e-4, sd=1.5), "data_collective_factor": Free(start=1.0, sd=0.4)},
    "tensor": {"tensor_collective_s": Free(start=3e-4, sd=1.5), "tensor_collective_factor": Free(start=1.0, sd=0.4)},
    "pipeline": {"pipeline_transfer_s": Free(start=3e-4, sd=1.5)},
}
"""Time around collectives, by mesh axis."""
AXIS = {"ddp": "data", "zero1": "data", "fsdp": "data", "tensor": "tensor", "pipeline": "pipeline"}
AROUND = {"data_layer_s", *(name for names in COLLECTIVES.values() for name in names)}
LAYER = Free(start=5e-4, sd=1.5)
CONTENTION = Free(start=1.0, sd=0.2)
MORE_PROCESSES = Free(start=1.0, sd=1.0)
"""Factor on the time around collectives with more processes than the fewest measured."""


@dataclass(frozen=True, kw_only=True)
class ResidualFit:
    """A calibration fitted to the measured steps, and its leave-one-out errors."""

    device: DeviceCalibration
    leave_one_out: Floats  # log(predicted / measured)
    before: Floats  # the same of the kernels without a fit to steps


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Steps of one number of processes in one number format."""

    index: list[int]
    runs: list[Run]
    num_processes: int
    precision: Precision
    tables: Mapping[str, Any]


def fit_residual(device: DeviceCalibration, rows: Sequence[DeviceRow]) -> ResidualFit | None:
    """Fit `device` to whole steps; None when there are too few of them."""
    if len(rows) < FEWEST_STEPS:
        return None
    cases = _cases(rows)
    measured = np.log([row.seconds_median for row in rows])
    noise = np.array([_noise(row) for row in rows])
    free = _free(device, rows)
    names, starts = list(free), np.log([f.start for f in free.values()])
    precision = np.array([1 / f.sd**2 for f in free.values()])

    def logs_at(betas: Sequence[Floats]) -> Floats:
        return _log_steps([_with(device, names, starts + beta) for beta in betas], cases, len(rows))

    def weights_at(residual: Floats) -> Floats:
        return 1 / (1 + (residual / (CAUCHY * noise)) ** 2) / noise**2

    def score(residual: Floats, beta: Floats) -> float:
        rho = CAUCHY**2 * np.log1p((residual / (CAUCHY * noise)) ** 2)
        return float(rho.sum() + (beta**2 * precision).sum())

    beta, damping = np.zeros(len(names)), DAMPING
    residual, jacobian = _linearized(logs_at, beta, measured)
    for _ in range(ITERATIONS):
        weights = weights_at(residual)
        curvature = (jacobian.T * weights) @ jacobian + np.diag(precision)
        gradient = jacobian.T @ (weights * residual) + precision * beta
        tried = beta - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
        tried_residual, tried_jacobian = _linearized(logs_at, tried, measured)
        gain = score(residual, beta) - score(tried_residual, tried)
        if gain > 0:
            beta, residual, jacobian, damping = tried, tried_residual, tried_jacobian, damping / 4
        else:
            damping *= 8
        if 0 < gain < TOLERANCE:
            break
    weights = weights_at(residual)
    curvature = (jacobian.T * weights) @ jacobian + np.diag(precision)
    leverage = weights * np.einsum("rp,pq,rq->r", jacobian, np.linalg.inv(curvature), jacobian)
    leave_one_out = residual / (1 - np.minimum(leverage, MAX_LEVERAGE))
    found = _with(device, names, starts + beta)
    spread = float(np.quantile(np.abs(leave_one_out), COVERED)) / Z80
    return ResidualFit(
        device=replace(found, unexplained_sd=max(spread, LEAST_NOISE)),
        leave_one_out=leave_one_out,
        before=_log_steps([device], cases, len(rows))[0] - measured,
    )


def _noise(row: DeviceRow) -> float:
    """Standard deviation of the logarithm of a step's seconds."""
    few = FEW_NOISE if row.samples < FEWEST_SAMPLES else LEAST_NOISE
    return math.hypot(math.log(row.seconds_high / row.seconds_low) / (2 * Z95), few)


def _cases(rows: Sequence[DeviceRow]) -> list[_Case]:
    by_case: dict[tuple[int, str], list[int]] = {}
    for i, row in enumerate(rows):
        by_case.setdefault((row.point.num_processes, row.point.format), []).append(i)
    return [_case(index, [rows[i] for i in index], num_processes=n) for (n, _), index in sorted(by_case.items())]


def _case(index: list[int], rows: list[DeviceRow], *, num_processes: int) -> _Case:
    runs = [run_of(row.point) for row in rows]
    models, plans = [model_row(run.model) for run in runs], [plan_row(plan_of(row.point)) for row in rows]
    batches = [BatchTable(seq_len=run.sequence_length, global_batch=run.global_batch) for run in runs]
    precision = runs[0].precision
    return _Case(
        index=index,
        runs=runs,
        num_processes=num_processes,
        precision=precision,
        tables={
            "model": type(models[0]).stack(models),
            "plan": type(plans[0]).stack(plans),
            "batch": BatchTable.stack(batches),
            "precision": precision_row(precision),
        },
    )


def _free(device: DeviceCalibration, rows: Sequence[DeviceRow]) -> dict[str, Free]:
    """Parameters that these steps can determine. `NAME:N` is a factor on NAME with N processes."""
    free = dict(ON_HOST if device.shares_host else ANYWHERE)
    for name in KERNELS:
        if name in device.parameters:
            free[name] = Free(start=device.parameters[name].value, sd=KERNELS_SD)
    if not device.shares_host:
        return free
    for kernel in {row.point.kernel for row in rows} & AXIS.keys():
        free |= COLLECTIVES[AXIS[kernel]]
    if any(row.point.num_processes > 1 for row in rows):
        free["data_layer_s"] = LAYER
    counts = sorted({row.point.num_processes for row in rows} - {1})
    around = [name for name in free if name in AROUND]
    free |= {f"contention:{count}": CONTENTION for count in counts}
    return free | {f"{name}:{count}": MORE_PROCESSES for name in around for count in counts[1:]}


def _with(device: DeviceCalibration, names: Sequence[str], logs: Floats) -> DeviceCalibration:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    by_processes: dict[str, dict[int, float]] = {}
    for name, x in values.items():
        of, _, count = name.partition(":")
        if count:
            by_processes.setdefault(of, {})[int(count)] = x
    contention = by_processes.pop("contention", {})
    fewest = min(contention, default=1)
    parameters = {name: _known(name, x) for name, x in values.items() if ":" not in name}
    factors = {name: values[name] / device.parameters[name].value for name in KERNELS if name in values}
    return replace(
        device,
        parameters={**device.parameters, **parameters},
        by_threads={count: _moved(kernels, factors) for count, kernels in device.by_threads.items()},
        contention={1: 1.0, **contention} if contention else {},
        by_processes={name: {fewest: 1.0, **factors} for name, factors in by_processes.items()},
    )


def _known(name: str, value: float) -> MeasuredParameter:
    is_share = prior().parameters[name].transform == "logit"
    return MeasuredParameter(value=min(value, LARGEST_SHARE) if is_share else value, sd=0.0)


def _moved(kernels: Kernels, factors: Mapping[str, float]) -> Kernels:
    """Apply the factors of all threads to the kernels with fewer threads."""
    moved = {
        name: _known(name, kernels.parameters[name].value * factor)
        for name, factor in factors.items()
        if name in kernels.parameters
    }
    return replace(kernels, parameters={**kernels.parameters, **moved})


def _log_steps(devices: Sequence[DeviceCalibration], cases: Sequence[_Case], num_rows: int) -> Floats:
    """Logarithms of seconds that each of m devices is predicted to take, m x rows, in the order of the rows."""
    found = np.empty((len(devices), num_rows))
    for case in cases:
        rates = [
            system_rates(
                device.cluster(case.num_processes), case.precision, case.runs[0].stack,
                calibration=device.calibration(num_devices=case.num_processes),
            )
            for device in devices
        ]  # fmt: skip
        found[:, case.index] = np.log(estimate_steps(**case.tables, rates=SystemRates.stack(rates).column()).step_s)
    return found


def _linearized(logs_at: Callable[[Sequence[Floats]], Floats], beta: Floats, measured: Floats) -> tuple[Floats, Floats]:
    """(log predicted - log measured, its derivative by each parameter), from one evaluation of the cost model."""
    logs = logs_at([beta, *(beta + DERIVATIVE_STEP * np.eye(len(beta)))])
    return logs[0] - measured, (logs[1:] - logs[0]).T / DERIVATIVE_STEP
