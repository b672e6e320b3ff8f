"""Ranking of measurements by how much each would narrow the interval of a run's estimate.

    gain(x) = (d log step / d log seconds of the kernel at x  *  sd of its efficiency correction at x)^2

The gain is the variance that the log step time loses when the kernel is measured at shape x (Settles 2009, "Active
learning literature survey", section 3.4). Shapes and slopes come from the cost model: it estimates the step with
corrections that record the shapes at which they are read, and again with each of these shapes 1 % slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.cost.rates import system_rates
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import plan_row
from meshwright.cost.uncertainty import Z80
from meshwright.planner.choice import best_plans, free_request, goal_of
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest, request_for
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

SLOWER = 1.01
"""Factor on a kernel's seconds for its slope."""
LEAST_STEP_SHARE = 1e-6
"""Share of the step below which the step does not depend on a kernel."""
Shape = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class KernelCandidate:
    """One shape of one kernel that the step uses."""

    kernel: str  # "gemm/forward/bf16"
    shape: Mapping[str, float]
    step_share: float  # of the step's time
    sd: float  # of the logarithm of the kernel's time there
    gain: float  # variance of the log step time


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Measurements for `run` in order of their gain, and the variance that no kernel measurement reduces."""

    run: str
    step: Estimate
    sd: float  # of the log step time
    candidates: tuple[KernelCandidate, ...]
    others: Mapping[str, float]  # shares of the interval's variance by calibrated input


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noted(EfficiencyCorrection):
    """A correction that records the shapes at which it is read, and is larger at one of them."""

    asked: dict[Shape, None] = field(default_factory=dict)
    slow: Shape | None = None

    def factor(self, *shape: Any) -> Any:
        found = super().factor(*shape)
        key = tuple(max(1.0, float(np.ravel(s)[0])) for s in shape)
        if np.size(found) == 1:
            self.asked[key] = None
        return found * SLOWER if key == self.slow else found


def advise(run: Run) -> Advice | None:
    """Return the ranking; None where the run's calibration has no efficiency corrections."""
    request = request_for(run)
    calibration = request.calibration
    if calibration is None or not calibration.corrections:
        return None
    plan = run.plan
    if plan is None:
        chosen = best_plans(free_request(run), goal=goal_of(run))
        request, plan = chosen.request, chosen.plans[0].plan
    noted = {name: _noted(s) for name, s in calibration.corrections.items()}
    step_s = _step_s(request, plan, noted)
    candidates = [
        _candidate(request, plan, noted, step_s, name=name, shape=shape)
        for name, correction in noted.items()
        for shape in list(correction.asked)
    ]
    estimate = estimate_plan(request, plan)
    step = estimate.step.step
    return Advice(
        run=run.name,
        step=step,
        sd=math.log(step.high / step.value) / Z80,
        candidates=tuple(sorted((c for c in candidates if c.step_share > LEAST_STEP_SHARE), key=lambda c: -c.gain)),
        others=estimate.uncertainty,
    )


def _noted(correction: EfficiencyCorrection, *, slow: Shape | None = None) -> _Noted:
    names = ("axes", "x", "y", "noise", "mean", "length", "sd")
    return _Noted(**{name: getattr(correction, name) for name in names}, slow=slow)


def _step_s(request: PlanRequest, plan: Plan, corrections: Mapping[str, EfficiencyCorrection]) -> float:
    """Seconds of the step, with the pipeline in closed form."""
    assert request.calibration is not None
    rates = system_rates(
        request.cluster, request.precision, request.stack,
        calibration=replace(request.calibration, corrections=corrections),
    )  # fmt: skip
    steps = estimate_steps(
        model=request.model_table, batch=request.batch_table, plan=plan_row(plan),
        precision=request.precision_table, rates=rates,
    )  # fmt: skip
    return float(np.ravel(steps.step_s)[0])


def _candidate(
    request: PlanRequest, plan: Plan, noted: Mapping[str, _Noted], step_s: float, *, name: str, shape: Shape
) -> KernelCandidate:
    correction = noted[name]
    slower_s = _step_s(request, plan, {**noted, name: _noted(correction, slow=shape)})
    share = math.log(slower_s / step_s) / math.log(SLOWER)
    sd = float(correction.predict(np.log2([shape])).sd[0])
    return KernelCandidate(
        kernel=name,
        shape=dict(zip(correction.axes, shape, strict=True)),
        step_share=share,
        sd=sd,
        gain=(share * sd) ** 2,
    )
