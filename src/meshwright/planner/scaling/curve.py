"""Scaling curves: one run at several sizes, each against the first.

    efficiency(W) = (tokens/s of W devices / W) / (tokens/s of W0 devices / W0)       W0: the first that works
    speedup(W)    = efficiency(W) x W / W0

The definition stands in table 1 of "At-scale AI training on AMD Instinct MI350/MI300X series GPUs"
(whitepaper, AMD 2025): realised over ideal performance. Failures are not in it: `goodput` is given separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.cost.goodput import Goodput
from meshwright.cost.goodput_simulation import SimulatedGoodput
from meshwright.planner.scaling.sizes import Costed, Study, Unreached, at_size
from meshwright.planner.scaling.spread import interval_factor, log_deviations, log_slopes
from meshwright.planner.training import Training, goodput_at, simulated_at, training_at
from meshwright.specs.estimate import Estimate

EXPOSED_DATA_PARALLEL = ("data_parallel", "gather")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalePoint:
    """One size that the run can be made at."""

    costed: Costed
    efficiency: Estimate  # its interval holds only what does not cancel against the first size
    speedup: float
    goodput: Goodput | None  # None: failures are not counted
    training: Training | None = None  # None: the number of tokens is unknown
    simulation: SimulatedGoodput | None = None  # None: not asked for

    @property
    def num_devices(self) -> int:
        return self.costed.num_devices


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleCurve:
    """`scale`'s answer: `points` are the sizes that work, ascending; the first is the base."""

    study: Study
    points: tuple[ScalePoint, ...]
    unreached: tuple[Unreached, ...]


def scale(study: Study, sizes: Sequence[int]) -> ScaleCurve:
    """The run at each of `sizes` (devices)."""
    found = [at_size(study, num_devices) for num_devices in sorted(set(sizes))]
    reached = [s for s in found if isinstance(s, Costed)]
    return ScaleCurve(
        study=study,
        points=tuple(_point(study, s, reached[0]) for s in reached),
        unreached=tuple(s for s in found if isinstance(s, Unreached)),
    )


def tokens_in(base: Costed, productive_s: float) -> float:
    """Tokens that `base` trains in `productive_s`, failures aside."""
    return base.rate.value * base.num_devices * productive_s


def with_tokens(curve: ScaleCurve, num_tokens: float) -> ScaleCurve:
    """The same curve for another length of the training; no step is costed again."""
    study = replace(curve.study, num_tokens=num_tokens)
    points = (replace(p, training=_training(study, p.costed, p.goodput)) for p in curve.points)
    return replace(curve, study=study, points=tuple(points))


def with_simulations(curve: ScaleCurve, days: float) -> ScaleCurve:
    """The same curve with `days` days of failures played at each size. Raises InputError where these are too many."""
    return replace(
        curve, points=tuple(replace(p, simulation=simulated_at(p.costed.request, days)) for p in curve.points)
    )


def exposed_data_parallel_s(costed: Costed) -> float:
    """Seconds of a step in which devices wait for gradients or parameters of other replicas."""
    components_s = costed.estimate.step.components_s
    return sum(components_s.get(name, 0.0) for name in EXPOSED_DATA_PARALLEL)


def efficiency_between(study: Study, costed: Costed, base: Costed) -> Estimate:
    """Ratio of tokens/s per device of `costed` to `base`, with the part of the interval that does not cancel."""
    factor = 1.0 if costed is base else interval_factor(deviations_between(study, costed, base))
    value = costed.rate.value / base.rate.value
    return Estimate(value=value, low=value / factor, high=value * factor, unit="ratio", tier=costed.rate.tier)


def deviations_between(study: Study, costed: Costed, base: Costed) -> dict[str, float]:
    """Signed standard deviation that each calibrated parameter gives the log of the two step times' ratio."""
    given = {"calibration": study.calibration, "load_factor": study.load_factor}
    slopes, others = (log_slopes(c.request, c.plan, **given) for c in (costed, base))
    return log_deviations(costed.request, slopes, others, calibration=study.calibration)


def _point(study: Study, costed: Costed, base: Costed) -> ScalePoint:
    efficiency = efficiency_between(study, costed, base)
    goodput = goodput_at(costed.request) if study.with_failures else None
    return ScalePoint(
        costed=costed,
        efficiency=efficiency,
        speedup=efficiency.value * costed.num_devices / base.num_devices,
        goodput=goodput,
        training=_training(study, costed, goodput),
    )


def _training(study: Study, costed: Costed, goodput: Goodput | None) -> Training | None:
    if study.num_tokens is None:
        return None
    return training_at(
        costed.request, costed.estimate.step, num_tokens=study.num_tokens, goodput=goodput, costs=study.costs
    )
