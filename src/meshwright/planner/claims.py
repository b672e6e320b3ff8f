"""Published claims, computed: the value of the cost model or the catalogue next to the printed one.

`catalog.claim_answers` says which claims can be computed and what has to be assumed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import exp, hypot, log

from meshwright.catalog.claim_answers import ClaimAnswer, ClaimQuantity, ClaimRun, claim_answer
from meshwright.catalog.lookup import Claim, accelerator, claim
from meshwright.catalog.mlperf_results import mlperf_result
from meshwright.errors import InfeasibleError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.scaling import Costed, EmulatedPoint, ScaleCurve, Study, emulate, scale, tokens_in
from meshwright.planner.search import search
from meshwright.planner.training import training_at
from meshwright.runfile import from_options
from meshwright.specs.estimate import Estimate, MemoryEstimate, Tier
from meshwright.specs.hardware import Accelerator
from meshwright.specs.run import Costs, Run
from meshwright.units import DAY_S, GB, PETA, TERA, gib

CATALOGUE_VALUES: dict[str, Callable[[Accelerator], float]] = {
    "memory_gib": lambda a: gib(a.memory_bytes),
    "memory_tb_per_s": lambda a: a.memory_bytes_per_s / TERA,
    "scale_up_gb_per_s": lambda a: a.scale_up_bytes_per_s / GB,
    "bf16_pflops": lambda a: a.peak_flops_per_s["bf16"] / PETA,
    "fp8_pflops": lambda a: a.peak_flops_per_s["fp8"] / PETA,
    "fp4_pflops": lambda a: a.peak_flops_per_s["fp4"] / PETA,
}


@dataclass(frozen=True, kw_only=True)
class ClaimPrediction:
    """The computed value of one claim, in the claim's unit. `plans` are those that it rests on."""

    claim: Claim
    value: Estimate
    plans: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Computed over printed."""
        return self.value.value / self.claim.value

    @property
    def is_inside(self) -> bool:
        """True if the printed value, which is rounded, may lie in the interval."""
        within = claim_answer(self.claim).within
        return self.value.low - within <= self.claim.value <= self.value.high + within


def predict_claim(found: Claim) -> ClaimPrediction | None:
    """The prediction of a claim about training; None where there is nothing to compute here.

    Raises InfeasibleError when no plan fits of which the claim needs one.
    """
    answer = claim_answer(found)
    if answer.reads is None or answer.reads not in _READERS:
        return None
    return _READERS[answer.reads](found, answer)


# --- one run, or two ---


@dataclass(frozen=True, kw_only=True)
class _Rate:
    plan: str
    tokens_per_s: Estimate  # per device


def _rate(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    rate = _rate_of(_run(answer))
    return ClaimPrediction(claim=found, value=rate.tokens_per_s, plans=(rate.plan,))


def _ratio(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    """The two errors are taken as independent: accelerator and software differ."""
    assert answer.against is not None
    one, other = _rate_of(_run(answer)), _rate_of(answer.against)
    a, b = one.tokens_per_s, other.tokens_per_s
    value = a.value / b.value
    longer = exp(hypot(log(a.high / a.value), log(b.value / b.low)))
    shorter = exp(hypot(log(a.value / a.low), log(b.high / b.value)))
    ratio = Estimate(value=value, low=value / shorter, high=value * longer, unit="x", tier=max(a.tier, b.tier))
    return ClaimPrediction(claim=found, value=ratio, plans=(one.plan, other.plan))


def _fits(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    best = search(_request(_run(answer)), top=1).best
    plans = () if best is None else (best.plan.describe(),)
    return ClaimPrediction(claim=found, value=_exact(float(best is not None), "bool", Tier.INTERPOLATED), plans=plans)


@cache
def _rate_of(asked: ClaimRun) -> _Rate:
    request = _request(asked)
    result = search(request, top=1)
    if result.best is None:
        raise InfeasibleError(explain_infeasible(result, suggest=False).binding)
    plan = result.best.plan
    step = estimate_plan(request, plan).step
    return _Rate(plan=plan.describe(), tokens_per_s=step.tokens_per_s_per_device)


def predicted_rate(asked: ClaimRun) -> tuple[Estimate, str]:
    """Tokens/s per device of the best plan, and the plan. Raises InfeasibleError where none fits."""
    found = _rate_of(asked)
    return found.tokens_per_s, found.plan


def predicted_memory(asked: ClaimRun) -> tuple[MemoryEstimate, str]:
    """Memory of the best plan on its fullest stage, and the plan. Raises InfeasibleError where none fits."""
    plan, request = _rate_of(asked).plan, _request(asked)
    best = search(request, top=1).best
    assert best is not None  # `_rate_of` raises where there is none
    return estimate_plan(request, best.plan).step.memory, plan


# --- sizes ---


def _efficiency(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    point = _emulated(_run(answer), found.num_accelerators or 0)
    return ClaimPrediction(claim=found, value=point.efficiency, plans=(point.emulated.plan.describe(),))


def _days(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    base, last = (p.costed for p in _curve(_run(answer), found.num_accelerators or 0).points)
    tokens = tokens_in(base, claim(answer.solved_by).value * DAY_S)
    steps = last.estimate.step
    productive = training_at(last.request, steps, num_tokens=tokens, goodput=None, costs=Costs()).productive
    ends = {name: getattr(productive, name) / DAY_S for name in ("value", "low", "high")}
    return ClaimPrediction(
        claim=found, value=Estimate(**ends, unit="days", tier=productive.tier), plans=_plans(base, last)
    )


def _speedup(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    first, last = _curve(_run(answer), found.num_accelerators or 0).points
    scale_by = last.num_devices / first.num_devices
    e = last.efficiency
    value = Estimate(value=e.value * scale_by, low=e.low * scale_by, high=e.high * scale_by, unit="x", tier=e.tier)
    return ClaimPrediction(claim=found, value=value, plans=_plans(first.costed, last.costed))


@cache
def _emulated(asked: ClaimRun, num_devices: int) -> EmulatedPoint:
    run = _run_of(asked)
    study = Study(request=request_for(run), plan=run.plan)
    return emulate(study, [num_devices], small=study.request.num_devices, with_real=False).points[0]


@cache
def _curve(asked: ClaimRun, num_devices: int) -> ScaleCurve:
    request = _request(asked)
    return scale(Study(request=request), [request.num_devices, num_devices])


def _plans(*costed: Costed) -> tuple[str, ...]:
    return tuple(c.plan.describe() for c in costed)


# --- catalogue ---


def _catalogue(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    value = CATALOGUE_VALUES[answer.value](accelerator(found.accelerator.lower()))
    return ClaimPrediction(claim=found, value=_exact(value, found.unit, Tier.DATASHEET))


def _exact(value: float, unit: str, tier: Tier) -> Estimate:
    return Estimate(value=value, low=value, high=value, unit=unit, tier=tier)


# --- what is asked ---


def _run(answer: ClaimAnswer) -> ClaimRun:
    assert answer.run is not None
    return answer.run


def _run_of(asked: ClaimRun) -> Run:
    return from_options(
        model=asked.model,
        cluster=asked.cluster,
        global_batch=asked.gbs,
        sequence_length=asked.seq,
        precision=asked.precision,
        engine=asked.engine,
        overrides=asked.set,
    )


def _request(asked: ClaimRun) -> PlanRequest:
    return request_for(_run_of(asked)).fixing(**fixed_fields(asked.fix))


# --- published results of MLPerf ---


def _minutes(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    return _published(found, _mean_minutes(answer.sets), "min", answer.sets)


def _minutes_ratio(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    under = _mean_minutes(answer.sets) if answer.sets else claim(answer.solved_by).value
    ratio = _mean_minutes(answer.against_sets) / under
    return _published(found, ratio, "x", answer.sets + answer.against_sets)


def _minutes_spread(found: Claim, answer: ClaimAnswer) -> ClaimPrediction:
    own = _mean_minutes(answer.sets)
    spread = max(abs(mlperf_result(name).score_min / own - 1) for name in answer.against_sets)
    return _published(found, spread, "ratio", answer.sets + answer.against_sets)


def _mean_minutes(names: tuple[str, ...]) -> float:
    return sum(mlperf_result(name).score_min for name in names) / len(names)


def _published(found: Claim, value: float, unit: str, sets: tuple[str, ...]) -> ClaimPrediction:
    return ClaimPrediction(claim=found, value=_exact(value, unit, Tier.MEASURED), plans=sets)


_READERS: dict[ClaimQuantity, Callable[[Claim, ClaimAnswer], ClaimPrediction]] = {
    ClaimQuantity.RATE: _rate,
    ClaimQuantity.RATIO: _ratio,
    ClaimQuantity.FITS: _fits,
    ClaimQuantity.EFFICIENCY: _efficiency,
    ClaimQuantity.DAYS: _days,
    ClaimQuantity.SPEEDUP: _speedup,
    ClaimQuantity.CATALOGUE: _catalogue,
    ClaimQuantity.MINUTES: _minutes,
    ClaimQuantity.MINUTES_RATIO: _minutes_ratio,
    ClaimQuantity.MINUTES_SPREAD: _minutes_spread,
}
