"""Everything that `meshwright scale` is asked, answered once for the terminal, JSON and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.errors import InfeasibleError
from meshwright.planner import request_for
from meshwright.planner.scaling import (
    Emulation,
    Mode,
    Replica,
    ScaleCurve,
    Sensitivity,
    Study,
    Unreached,
    curve_ends,
    emulate,
    emulation_ends,
    rank_replicas,
    request_at,
    scale,
    sensitivity,
    tokens_in,
    with_tokens,
)
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.units import DAY_S

DEFAULT_FACTORS = (1, 2, 4, 8, 16)
"""Sizes to try when none are named, in units of the run's own cluster."""


@dataclass(frozen=True, kw_only=True)
class ScaleQuestion:
    """What is asked. `sizes` empty: `DEFAULT_FACTORS`. `small` None: nothing is emulated.

    `days`: take as length of the training what the first size trains in so many days, failures aside.
    """

    sizes: tuple[int, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields of every plan that the planner makes
    mode: Mode = Mode.STRONG
    keep_plan: bool = False
    small: int | None = None
    replicas: tuple[int, ...] = ()
    with_sensitivity: bool = False
    with_failures: bool = True
    num_tokens: float | None = None
    days: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleReport:
    """The answers; those that were not asked for are None or empty."""

    run: Run
    study: Study
    curve: ScaleCurve | None = None
    emulation: Emulation | None = None
    replicas: tuple[Replica, ...] = ()
    replica_cluster: str = ""
    sensitivity: Sensitivity | None = None


def scale_report(run: Run, question: ScaleQuestion) -> ScaleReport:
    """Answer `question`. A curve is drawn unless an emulation or a ranking of replicas is asked for.

    Raises InfeasibleError when no size works, InputError when a size is no whole number of nodes.
    """
    study = _study(run, question)
    sizes = question.sizes or tuple(factor * study.request.num_devices for factor in DEFAULT_FACTORS)
    report = ScaleReport(run=run, study=study)
    if question.replicas:
        report = _with_replicas(report, max(sizes), question.replicas)
    if question.small is not None:
        study = replace(study, plan=run.plan)
        emulation = emulate(study, sizes, small=question.small)
        compare = emulation_ends(max(sizes), small=question.small)
        report = replace(report, study=study, emulation=emulation)
    elif question.replicas:
        return report
    else:
        curve = _curve(replace(study, plan=_kept(study, run, sizes)) if question.keep_plan else study, sizes)
        if question.days is not None:
            curve = with_tokens(curve, tokens_in(curve.points[0].costed, question.days * DAY_S))
        compare = curve_ends([p.num_devices for p in curve.points])
        report = replace(report, study=curve.study, curve=curve)
    if not question.with_sensitivity:
        return report
    margins = sensitivity(report.study, compare)
    return report if isinstance(margins, Unreached) else replace(report, sensitivity=margins)


def _study(run: Run, question: ScaleQuestion) -> Study:
    # A pinned run fixes its micro-batch, which must not bind the planner at other sizes.
    request = request_for(run, fixed={}) if run.plan is not None else request_for(run)
    tokens = run.train.tokens or (run.train.steps and run.train.steps * run.tokens_per_step)
    return Study(
        request=request.fixing(**question.fixed),
        mode=question.mode,
        num_tokens=question.num_tokens or tokens,
        costs=run.costs,
        with_failures=question.with_failures,
    )


def _kept(study: Study, run: Run, sizes: Sequence[int]) -> Plan:
    """The plan to keep: the run's own, else the planner's for the first size that works."""
    return run.plan or _curve(study, [min(sizes)]).points[0].costed.plan


def _curve(study: Study, sizes: Sequence[int]) -> ScaleCurve:
    curve = scale(study, sizes)
    if not curve.points:
        first = curve.unreached[0]
        raise InfeasibleError(
            f"the run cannot be made on {first.num_devices:,} devices: {first.why_not}",
            hint="name other sizes with --devices, or leave the plan to the planner",
        )
    return curve


def _with_replicas(report: ScaleReport, num_devices: int, sizes: Sequence[int]) -> ScaleReport:
    request = request_at(report.study, num_devices)
    if isinstance(request, Unreached):
        raise InfeasibleError(f"{num_devices:,} devices: {request.why_not}")
    replicas = rank_replicas(request, sizes)
    if not replicas:
        raise InfeasibleError(
            f"no replica of {', '.join(f'{s:,}' for s in sizes)} devices works on {request.cluster.name}",
            hint="the replica must divide the devices, and the replicas the global batch",
        )
    return replace(report, replicas=replicas, replica_cluster=request.cluster.name)
