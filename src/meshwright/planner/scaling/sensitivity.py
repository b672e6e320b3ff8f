"""Sensitivity of the answer to each assumption: one is changed at a time, the rest stays.

Two kinds of change. An assumption of the run (batch, sequence length, network, ...) may ask for another plan,
so the planner is asked again, unless the study keeps its plan. An assumption of the cost model (routing,
stragglers, calibrated parameters) changes the time of the plans that were found.

The answer is the efficiency between two steps: the first and the last size of a curve, or the whole batch and
the smallest one of an emulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from meshwright.calibration.parameters import ALL, Calibration, Offset, fitted
from meshwright.cost.uncertainty import Z80
from meshwright.errors import MeshwrightError
from meshwright.planner.request import PlanRequest
from meshwright.planner.scaling.curve import deviations_between, scale
from meshwright.planner.scaling.emulation import emulate
from meshwright.planner.scaling.sizes import Costed, Study, Unreached, replica_devices
from meshwright.planner.training import goodput_at
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

BUSIEST_RATIO = 1.2
"""Tokens of the busiest expert rank over the mean, where routing is not balanced: an example."""

NUM_PARAMETERS = 3
STRAGGLING = "slowdown_per_doubling"


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """The two ends of a comparison."""

    base: Costed
    end: Costed

    @property
    def efficiency(self) -> float:
        return self.end.rate.value / self.base.rate.value


@dataclass(frozen=True, kw_only=True)
class AssumptionSwing:
    """The answer under one changed assumption. Numbers are None where the run cannot be made."""

    assumption: str
    value: str
    base_step_s: float | None = None
    end_step_s: float | None = None
    efficiency: float | None = None
    change: float | None = None  # of the efficiency, against the study as it stands
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The study as it stands, and the swings, largest change first; those without an answer last."""

    efficiency: float
    base_step_s: float
    end_step_s: float
    swings: tuple[AssumptionSwing, ...]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One changed assumption."""

    assumption: str
    value: str
    change: Callable[[Study], Study]
    replans: bool = True  # plans found before do not apply


Compare = Callable[[Study], Pair | Unreached]


def curve_ends(sizes: Sequence[int]) -> Compare:
    """Compare the smallest of `sizes` with the largest."""
    first, last = min(sizes), max(sizes)

    def compare(study: Study) -> Pair | Unreached:
        curve = scale(replace(study, with_failures=False, num_tokens=None), [first, last])
        if curve.unreached:
            return curve.unreached[0]
        base, end = (p.costed for p in (curve.points[0], curve.points[-1]))
        return Pair(base=base, end=end)

    return compare


def emulation_ends(size: int, *, small: int) -> Compare:
    """Compare the whole batch on `small` devices with the share that stands for `size`."""

    def compare(study: Study) -> Pair | Unreached:
        emulation = emulate(study, [size], small=small, with_real=False)
        if emulation.unreached:
            return emulation.unreached[0]
        return Pair(base=emulation.base, end=emulation.points[0].emulated)

    return compare


def sensitivity(study: Study, compare: Compare) -> Sensitivity | Unreached:
    """The efficiency under every variation; Unreached when the study has none as it stands."""
    now = compare(study)
    if isinstance(now, Unreached):
        return now
    plans = {c.num_devices: c.plan for c in (now.base, now.end)} if study.plan is None else {}
    swings = [_swing(study, v, compare, now, plans) for v in _variations(study, now)]
    swings += _failures(now) if study.with_failures else []
    swings += _parameters(study, now)
    answered = [s for s in swings if s.change is not None and abs(s.change) >= 5e-4]
    unanswered = [s for s in swings if s.change is None]
    return Sensitivity(
        efficiency=now.efficiency,
        base_step_s=now.base.step_s,
        end_step_s=now.end.step_s,
        swings=(*sorted(answered, key=lambda s: -abs(s.change or 0.0)), *unanswered),
    )


def _swing(study: Study, variation: Variation, compare: Compare, now: Pair, plans: dict[int, Plan]) -> AssumptionSwing:
    changed = variation.change(study if variation.replans else replace(study, known=plans))
    try:
        pair = compare(changed)
    except MeshwrightError as error:  # a format the accelerator lacks, a plan that does not fit
        pair = Unreached(num_devices=0, global_batch=0, why_not=error.message)
    if isinstance(pair, Unreached):
        return AssumptionSwing(assumption=variation.assumption, value=variation.value, why_not=pair.why_not)
    return AssumptionSwing(
        assumption=variation.assumption,
        value=variation.value,
        base_step_s=pair.base.step_s,
        end_step_s=pair.end.step_s,
        efficiency=pair.efficiency,
        change=pair.efficiency - now.efficiency,
    )


# --- assumptions of the run ---


def _variations(study: Study, now: Pair) -> Iterator[Variation]:
    request = study.request
    for factor, word in ((0.5, "half"), (2, "twice")):
        yield _of_request("global batch", word, lambda r, f=factor: _batch_times(r, f))
        yield _of_request("network port", f"{word} the rate", lambda r, f=factor: _port_times(r, f))
        seq_len = round(request.seq_len * factor)
        yield _of_request("sequence length", f"{seq_len:,}", lambda r, f=factor: _sequence_times(r, f))
        yield Variation(
            assumption="growth of stragglers",
            value=word,
            change=lambda s, f=factor: replace(s, calibration=_shifted(s.calibration or fitted(), STRAGGLING, log(f))),
            replans=False,
        )
    yield _of_request("spine", "oversubscribed 2:1", _oversubscribed_spine)
    other = PRECISIONS["fp8" if request.precision.matmul == "bf16" else "bf16"]
    yield _of_request("precision", other.name, lambda r: replace(r, precision=other))
    yield _of_request("micro-batch", "2 sequences", lambda r: r.fixing(micro_batch=2))
    if request.model.experts is not None:
        yield Variation(
            assumption="routing",
            value=f"busiest rank {BUSIEST_RATIO:g} x the mean",
            change=lambda s: replace(s, load_factor=BUSIEST_RATIO),
            replans=False,
        )
    if study.plan is None:
        for costed, which in ((now.base, "first"), (now.end, "last")):
            yield Variation(
                assumption="plan",
                value=f"of the {which} size kept (replica of {replica_devices(costed.plan):,})",
                change=lambda s, plan=costed.plan: replace(s, plan=plan),
            )


def _of_request(assumption: str, value: str, change: Callable[[PlanRequest], PlanRequest]) -> Variation:
    return Variation(assumption=assumption, value=value, change=lambda s: replace(s, request=change(s.request)))


def _batch_times(request: PlanRequest, factor: float) -> PlanRequest:
    return replace(request, global_batch=max(1, round(request.global_batch * factor)))


def _sequence_times(request: PlanRequest, factor: float) -> PlanRequest:
    """Longer sequences, as many tokens in a batch."""
    batch = max(1, round(request.global_batch / factor))
    return replace(request, seq_len=round(request.seq_len * factor), global_batch=batch)


def _port_times(request: PlanRequest, factor: float) -> PlanRequest:
    fabric = request.cluster.fabric
    fabric = replace(fabric, scale_out_bytes_per_s=fabric.scale_out_bytes_per_s * factor)
    return replace(request, cluster=replace(request.cluster, fabric=fabric))


def _oversubscribed_spine(request: PlanRequest) -> PlanRequest:
    fabric = replace(request.cluster.fabric, oversubscription=2.0)
    return replace(request, cluster=replace(request.cluster, fabric=fabric))


# --- assumptions of the cost model ---


def _shifted(calibration: Calibration, name: str, by: float) -> Calibration:
    """The calibration with one parameter moved by `by` in transformed units."""
    key = (name, ALL, ALL)
    old = calibration.offsets.get(key, Offset(value=0.0, sd=calibration.parameters[name].sd, num_rows=0))
    return replace(calibration, offsets={**calibration.offsets, key: replace(old, value=old.value + by)})


def _parameters(study: Study, now: Pair) -> list[AssumptionSwing]:
    """The calibrated parameters that weigh most, at the ends of their 80 % intervals."""
    deviations = deviations_between(study, now.end, now.base)
    names = [name for name in deviations if name != STRAGGLING]  # has a row of its own
    heaviest = sorted(names, key=lambda name: -abs(deviations[name]))[:NUM_PARAMETERS]
    swings = []
    for name in heaviest:
        for sign, word in ((1, "high end"), (-1, "low end")):
            # d log efficiency = -d log(T_end / T_base)
            efficiency = now.efficiency * exp(-sign * Z80 * deviations[name])
            swings.append(
                AssumptionSwing(
                    assumption=f"calibrated {name}",
                    value=f"{word} of its interval",
                    efficiency=efficiency,
                    change=efficiency - now.efficiency,
                )
            )
    return swings


def _failures(now: Pair) -> list[AssumptionSwing]:
    """Failures and checkpoints counted in: efficiency times the ratio of goodputs."""
    first, last = (goodput_at(c.request) for c in (now.base, now.end))
    if now.base.num_devices == now.end.num_devices:
        return []
    rates = {"as planned": (first.value, last.value), "most published": (first.low, last.low)}
    rates["fewest published"] = (first.high, last.high)
    return [
        AssumptionSwing(
            assumption="failures counted in",
            value=word,
            efficiency=now.efficiency * b / a,
            change=now.efficiency * (b / a - 1),
        )
        for word, (a, b) in rates.items()
    ]
