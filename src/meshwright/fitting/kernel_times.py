"""The calibration of a training with `cluster: here`, from kernels timed at its shapes just before it.

    measured                               parameter that is solved for
    linear layers                          gemm_ratio
    attention, forward and backward        attention_forward_ratio, attention_backward_ratio
    experts and their routing              grouped_ratio
    rest of the layer                      elementwise_factor
    all layers together                    general_factor
    embedding, head and loss               head_factor
    the optimizer's step                   optimizer_passes
    an all-reduce between processes        scale_up_ratio

Each parameter is found by bisection on the cost model, one after the other: its own seconds are monotone in it. At the
measured shape the model then gives the measured seconds; its formulas extrapolate to other plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.calibration.parameters import Calibration, MeasuredParameter, fitted
from meshwright.cost.collectives import all_reduce_s
from meshwright.cost.compute import LayerCompute, layer_compute
from meshwright.cost.groups import groups_of
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.rates import SystemRates, system_rates
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import BatchTable, PlanTable, model_row, plan_row
from meshwright.planner.request import PlanRequest
from meshwright.specs.model import Model
from meshwright.specs.plan import Plan

MOST_EVALUATIONS = 60
TOLERANCE = 1e-7
"""Largest relative error of a time that the model gives for a measured one."""
REACH = 12.0
"""Largest distance of a parameter from its prior in the search, in transformed units (logarithm or logit)."""

NOTHING_S = 1e-9
"""Seconds that stand for zero where a logarithm is taken."""


TODAY = {
    "moe_factor": 1.0,
    "dense_gain_per_year": NOTHING_S,
    "moe_gain_per_year": NOTHING_S,
    "host_gain_per_year": NOTHING_S,
}
"""Parameters of a stack's age. They are neutral here: `general_factor` is measured with the installed stack."""

HOST = {
    "host_layer_s": NOTHING_S,  # no separate host issues kernels
    "host_moe_s": NOTHING_S,
    "host_expert_s": NOTHING_S,
    "sustained_ratio": 1 - NOTHING_S,  # peak and copy rate were measured, not read from a datasheet
    "memory_ratio": 1 - NOTHING_S,
    # The cores that compute also communicate: nothing overlaps.
    "tensor_exposed_ratio": 1 - NOTHING_S,
    "expert_exposed_ratio": 1 - NOTHING_S,
    "pipeline_exposed_ratio": 1 - NOTHING_S,
    "data_hidden_ratio": NOTHING_S,
    "gather_hidden_ratio": NOTHING_S,
}
"""Parameters of a CPU whose rates were measured."""


AROUND = {"data_layer_s": 2.5e-3, "data_collective_s": 2e-3, "tensor_collective_s": 2.5e-3, "pipeline_transfer_s": 2e-4}
AROUND_SD = 1.0
"""Seconds that a process spends around communication where it computes on the same CPU. An assumption from steps on one
CPU (docs/log.md), right within a factor of three. `bench device` and `calibrate` measure it."""


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Seconds on one device for one micro-batch of `num_tokens` tokens, forward and backward unless said.

    A layer is one of those that the model has most of. `sd` is the standard deviation of the logarithm of a
    repeated measurement.
    """

    micro_batch: int  # sequences
    linear_s: float  # linear layers of one layer
    attention_forward_s: float  # scores and values of one layer
    attention_backward_s: float
    experts_s: float | None  # one layer's mixture of experts, routing included; None in a dense model
    layer_s: float
    rest_s: float  # embedding, head and loss
    update_s: float  # optimizer step of a model of `update_layers` layers
    update_layers: int
    sd: float
    on_host: bool  # the device is the host CPU, with measured rates
    slowdown: float = 1.0  # these times over those of the fastest repetition


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Seconds of one all-reduce between `num_devices` devices."""

    size_bytes: int
    num_devices: int
    seconds: float
    sd: float


def calibration_here(
    request: PlanRequest, times: KernelTimes, *, collective: CollectiveTime | None = None, made: str
) -> Calibration:
    """The shipped calibration with the parameters that `times` give at the request's model and precision.

    It is no stranger's: layers of the request's own model were timed on the machine.
    """
    solver = _Solver(request, times, replace(request.calibration or fitted(), stranger_sd={}), made)
    solver.know(TODAY)
    if times.on_host:
        solver.know(HOST)
    experts_s = times.experts_s or 0.0
    left_s = times.layer_s - times.linear_s - times.attention_forward_s - times.attention_backward_s
    solver.solve("gemm_ratio", times.linear_s, lambda at: _linear_s(at.layer(), request.model))
    solver.solve("attention_forward_ratio", times.attention_forward_s, lambda at: at.layer().attention_core.forward_s)
    solver.solve("attention_backward_ratio", times.attention_backward_s, lambda at: at.layer().attention_core.input_s)
    if times.experts_s is not None:
        solver.solve("grouped_ratio", experts_s, lambda at: _routed_s(at.layer()))
    solver.solve(
        "elementwise_factor", max(left_s - experts_s, NOTHING_S), lambda at: _elementwise_s(at.layer(), request.model)
    )
    solver.solve("general_factor", times.layer_s * times.update_layers, lambda at: at.layers_s())
    solver.solve("head_factor", times.rest_s, lambda at: at.steps().components_s["head"])
    solver.solve("optimizer_passes", times.update_s, lambda at: at.steps().components_s["optimizer"])
    if collective is not None and times.on_host:
        solver.know(AROUND, sd=AROUND_SD)
    if collective is not None:
        solver.solve("scale_up_ratio", collective.seconds, lambda at: at.collective_s(collective), sd=collective.sd)
    return solver.calibration


def _linear_s(layer: LayerCompute, model: Model) -> float:
    """Projections of attention, and the feed-forward block where it is dense."""
    dense = 0.0 if model.experts is not None else layer.dense_ffn.total_s
    return float(layer.attention_gemm.total_s + dense)


def _routed_s(layer: LayerCompute) -> float:
    return float(layer.experts.total_s + layer.router.total_s)


def _elementwise_s(layer: LayerCompute, model: Model) -> float:
    return float((layer.elementwise if model.experts is None else layer.moe_elementwise).total_s)


@dataclass(frozen=True, kw_only=True)
class _Point:
    """The cost model at one calibration: one device, one micro-batch, `update_layers` equal layers."""

    request: PlanRequest
    times: KernelTimes
    rates: SystemRates

    @property
    def facts(self) -> Mapping[str, object]:
        shallow = shallow_model(self.request.model, num_layers=self.times.update_layers)
        return {
            "model": model_row(shallow, lora=self.request.lora),
            "batch": BatchTable(seq_len=self.request.seq_len, global_batch=self.times.micro_batch),
            "plan": self.plan,
            "precision": self.request.precision_table,
        }

    @property
    def plan(self) -> PlanTable:
        return plan_row(Plan(micro_batch=self.times.micro_batch))

    def layer(self) -> LayerCompute:
        shapes = LayerShapes(**self.facts, rates=self.rates.device)  # pyright: ignore[reportArgumentType]
        return layer_compute(shapes)

    def steps(self) -> StepTable:
        return estimate_steps(**self.facts, rates=self.rates)  # pyright: ignore[reportArgumentType]

    def layers_s(self) -> float:
        """Seconds of the step without the head and without what happens once per step."""
        steps = self.steps()
        others = ("head", "optimizer", "fixed", "stragglers")
        return _number(steps.step_s - sum(steps.components_s[name] for name in others))

    def collective_s(self, collective: CollectiveTime) -> float:
        plan = plan_row(Plan(data_shard=collective.num_devices))
        return _number(all_reduce_s(float(collective.size_bytes), groups_of(plan, self.rates.network).whole))


class _Solver:
    """Base calibration and the parameters found so far."""

    def __init__(self, request: PlanRequest, times: KernelTimes, base: Calibration, made: str) -> None:
        self.request, self.times, self.made = request, times, made
        self.base, self.measured = base, {}

    @property
    def calibration(self) -> Calibration:
        return self.base.with_measured(self.measured, made=self.made)

    def know(self, values: Mapping[str, float], *, sd: float = 0.0) -> None:
        """Set these values without measuring them."""
        self.measured |= {name: MeasuredParameter(value=value, sd=sd) for name, value in values.items()}

    def solve(self, name: str, seconds: float, model_s: Callable[[_Point], object], *, sd: float | None = None) -> None:
        """Set `name` so that `model_s` gives `seconds`, or to the end of its range where no value does."""
        parameter = self.base.parameters[name]
        low, high = (parameter.forward(parameter.prior) + d for d in (-REACH, REACH))
        goal = math.log(max(seconds, NOTHING_S))
        eta = _crossing(lambda at: math.log(max(self._at(name, at, model_s), NOTHING_S)) - goal, low, high)
        self.measured[name] = self._value(name, eta, self.times.sd if sd is None else sd)

    def _value(self, name: str, eta: float, sd: float) -> MeasuredParameter:
        value = float(self.base.parameters[name].inverse(np.asarray(eta)))
        return MeasuredParameter(value=min(value, 1 - NOTHING_S) if self._is_share(name) else value, sd=sd)

    def _is_share(self, name: str) -> bool:
        return self.base.parameters[name].transform != "log"

    def _at(self, name: str, eta: float, model_s: Callable[[_Point], object]) -> float:
        tried = {**self.measured, name: self._value(name, eta, 0.0)}
        request = self.request
        rates = system_rates(
            request.cluster,
            request.precision,
            request.stack,
            calibration=self.base.with_measured(tried, made=self.made),
        )
        return _number(model_s(_Point(request=request, times=self.times, rates=rates)))


def _crossing(residual: Callable[[float], float], low: float, high: float) -> float:
    """Root of a monotone function in [low, high], or the end that is nearer to one.

    False position; an end that stays twice counts for half of its residual (the Illinois method).
    """
    at_low, at_high = residual(low), residual(high)
    if at_low * at_high >= 0:
        return low if abs(at_low) < abs(at_high) else high
    eta, stayed = low, 0
    for _ in range(MOST_EVALUATIONS):
        eta = (low * at_high - high * at_low) / (at_high - at_low)
        if not low < eta < high:  # an end that is not finite
            eta = (low + high) / 2
        at_eta = residual(eta)
        if abs(at_eta) < TOLERANCE:
            break
        if at_eta * at_high > 0:
            high, at_high = eta, at_eta
            at_low, stayed = (at_low / 2 if stayed == -1 else at_low), -1
        else:
            low, at_low = eta, at_eta
            at_high, stayed = (at_high / 2 if stayed == 1 else at_high), 1
    return eta


def shallow_model(model: Model, *, num_layers: int) -> Model:
    """`model` with `num_layers` layers of the kind that it has most of."""
    experts = model.experts and replace(model.experts, num_dense_layers=0)
    windowed = num_layers if 2 * model.num_windowed_layers > model.num_layers else 0
    attention = replace(model.attention, num_windowed_layers=windowed, window_pattern=())
    return replace(model, num_layers=num_layers, experts=experts, attention=attention, num_mtp_layers=0)


def _number(value: object) -> float:
    found = float(np.ravel(np.asarray(value))[0])
    return found if math.isfinite(found) else math.inf
