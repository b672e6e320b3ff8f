"""The scaling study of a run, made once for the terminal, JSON, the page and the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.answers.documents.plan import plan_document, request_document, step_document, training_document
from meshwright.answers.quantities import percent, with_ends
from meshwright.engines.choice import notes_on_engine, with_planned_engine
from meshwright.errors import InfeasibleError, InputError
from meshwright.json_values import jsonable, picked
from meshwright.planner import request_for, scaling
from meshwright.planner.choice import fixing, goal_of
from meshwright.planner.estimate import notes_on_gaps
from meshwright.planner.request import note_on_labels
from meshwright.planner.scaling import Deadline, Emulation, Mode, Replica, ScaleCurve, Sensitivity, Study
from meshwright.planner.software import search_with_software
from meshwright.result import Result
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.units import DAY_S

DEFAULT_FACTORS = (1, 2, 4, 8, 16)
"""Sizes to try when none are named, in units of the run's own cluster."""


@dataclass(frozen=True, kw_only=True)
class ScaleQuestion:
    """Parameters of a study.

    `devices` empty: `DEFAULT_FACTORS`. `emulate`: number of devices that emulate each size; None: no emulation.
    `days`: length of the training in days on the first size, without failures. `deadline`: days in which the fewest
    devices are to train. `simulate`: days of failures to play.
    """

    devices: tuple[int, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields of every plan that the planner makes
    mode: Mode = Mode.STRONG
    keep_plan: bool = False
    emulate: int | None = None
    replicas: tuple[int, ...] = ()
    sensitivity: bool = False
    failures: bool = True
    tokens: float | None = None
    days: float | None = None
    deadline: float | None = None
    simulate: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ScaleReport(Result):
    """The study's answers; those that were not asked for are None or empty.

    Attributes:
        run: the run that was scaled.
        study: mode, length of the training, costs.
        curve: one point for each number of devices: efficiency, speed-up, goodput, whole training.
        emulation: a small cluster that stands for each size, and the effects that it cannot show.
        replicas: replica sizes of the largest cluster, best first.
        replica_cluster: name of that cluster.
        sensitivity: efficiency with one assumption changed at a time.
        deadline: the fewest devices that train in time.
        notes: cautions about the engine: it is `any`, or no run of its kind was measured on the accelerator; and about
            parts of the run that the prediction lacks.
    """

    run: Run
    study: Study
    curve: ScaleCurve | None = None
    emulation: Emulation | None = None
    replicas: tuple[Replica, ...] = ()
    replica_cluster: str = ""
    sensitivity: Sensitivity | None = None
    deadline: Deadline | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        study = self.study
        document: dict[str, Any] = {
            "request": request_document(self.run, study.request),
            "mode": study.mode,
            "num_tokens": study.num_tokens,
        }
        if self.notes:
            document["notes"] = self.notes
        if self.curve is not None:
            document["points"] = [_point(p) for p in self.curve.points]
            document["unreached"] = [_unreached(u) for u in self.curve.unreached]
        if self.emulation is not None:
            document["emulation"] = {
                "base": _costed(self.emulation.base),
                "points": [_emulated(p) for p in self.emulation.points],
                "unreached": [_unreached(u) for u in self.emulation.unreached],
            }
        if self.replicas:
            document["replicas"] = [{"relative_ratio": r.relative_ratio, **_costed(r.costed)} for r in self.replicas]
        if self.sensitivity is not None:
            document["sensitivity"] = self.sensitivity
        if self.deadline is not None:
            document["deadline"] = self.deadline
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each number of devices; without a curve, for each emulated size or replica."""
        if self.curve is not None:
            return [_curve_row(point) for point in self.curve.points]
        if self.emulation is not None:
            return [
                {"num_devices": p.num_devices, "plan": p.emulated.plan.describe(), "step_s": p.emulated.step_s,
                 **with_ends("efficiency_ratio", p.efficiency)}
                for p in self.emulation.points
            ]  # fmt: skip
        return [
            {"replica_devices": r.num_devices, "plan": r.costed.plan.describe(), "step_s": r.costed.step_s,
             "relative_ratio": r.relative_ratio}
            for r in self.replicas
        ]  # fmt: skip

    def summary(self) -> str:
        """Return model, accelerator and the efficiency at the largest size."""
        request = self.study.request
        named = f"{request.model.name} on {request.cluster.accelerator.name}, {self.study.mode.value} scaling"
        if self.curve is None:
            return named
        first, last = self.curve.points[0], self.curve.points[-1]
        return (
            f"{named} from {first.num_devices:,} to {last.num_devices:,} devices: "
            f"efficiency {percent(last.efficiency.value)}"
        )


def _curve_row(point: scaling.ScalePoint) -> dict[str, Any]:
    step, training = point.costed.estimate.step, point.training
    row: dict[str, Any] = {
        "num_devices": point.num_devices,
        "plan": point.costed.plan.describe(),
        "global_sequences": point.costed.global_batch,
        **with_ends("step_s", step.step),
        **with_ends("tokens_per_s_per_device", step.tokens_per_s_per_device),
        **with_ends("efficiency_ratio", point.efficiency),
        "speedup_ratio": point.speedup,
        "goodput_ratio": point.goodput and point.goodput.value,
    }
    if training is not None:
        row |= {
            **with_ends("training_s", training.wall),
            "energy_mwh": training.energy and training.energy.value,
            "cost_usd": training.cost and training.cost.value,
        }
    return row


def scale_of_run(
    *,
    run: Run,
    devices: Sequence[int],
    mode: str,
    fixed: Mapping[str, object] | None,
    replicas: Sequence[int],
    **asked: Any,
) -> ScaleReport:
    """The answer to `meshwright.scale`. `asked` are other fields of `ScaleQuestion`."""
    if asked["tokens"] is not None and asked["days"] is not None:
        raise InputError("tokens and days both give the length of the training", hint="give one of them")
    sizes, of_replicas = (tuple(sorted(set(numbers))) for numbers in (devices, replicas))
    if asked["simulate"] is not None and (not asked["failures"] or asked["emulate"] is not None or replicas):
        raise InputError(
            "the failures of a curve are simulated",
            got="no curve with failures",
            hint="leave out --no-goodput, --emulate and --replicas",
        )
    other = ("emulate", "keep_plan", "days")
    if asked["deadline"] is not None and (devices or replicas or any(asked[name] for name in other)):
        raise InputError(
            "a deadline chooses the numbers of devices, for a length in tokens",
            got="numbers of devices, or another question",
            hint="leave out --devices, --replicas, --emulate, --keep-plan and --days",
        )
    question = ScaleQuestion(devices=sizes, mode=Mode(mode), fixed=fixed or {}, replicas=of_replicas, **asked)
    return scale_report(run, question)


def scale_report(run: Run, question: ScaleQuestion) -> ScaleReport:
    """Answer `question`. A curve is drawn unless an emulation or a ranking of replicas is asked for.

    Raises InfeasibleError when no size works, InputError when a size is no whole number of nodes or the engine runs the
    model or its numbers under no plan.
    """
    of_engine, run = notes_on_engine(run), with_planned_engine(run)
    if question.tokens is not None and question.tokens < run.tokens_per_batch:
        raise InputError(
            "the training is shorter than one step", got=f"{question.tokens:,.0f} tokens",
            allowed=f"at least the {run.tokens_per_batch:,} tokens of a step", hint="15 trillion tokens are 15e12",
        )  # fmt: skip
    study = _study(run, question)
    notes = (*of_engine, *note_on_labels(run), *notes_on_gaps(study.request))
    sizes = question.devices or tuple(factor * study.request.num_devices for factor in DEFAULT_FACTORS)
    deadline = None if question.deadline is None else _deadline(study, question.deadline)
    if deadline is not None:
        sizes = tuple(sorted({deadline.num_devices, deadline.num_devices_at_high_end or deadline.num_devices}))
    report = ScaleReport(run=run, study=study, notes=notes, deadline=deadline)
    if question.replicas:
        report = _with_replicas(report, max(sizes), question.replicas)
    if question.emulate is not None:
        study = replace(study, plan=run.plan)
        emulation = scaling.emulate(study, sizes, small=question.emulate)
        compare = scaling.emulation_ends(max(sizes), small=question.emulate)
        report = replace(report, study=study, emulation=emulation)
    elif question.replicas:
        return report
    else:
        curve = _curve(replace(study, plan=_kept(study, run, sizes)) if question.keep_plan else study, sizes)
        if question.days is not None:
            curve = scaling.with_tokens(curve, scaling.tokens_in(curve.points[0].costed, question.days * DAY_S))
        if question.simulate is not None:
            curve = scaling.with_simulations(curve, question.simulate)
        compare = scaling.curve_ends([p.num_devices for p in curve.points])
        report = replace(report, study=curve.study, curve=curve)
    if not question.sensitivity:
        return report
    margins = scaling.sensitivity(report.study, compare)
    return report if isinstance(margins, scaling.Unreached) else replace(report, sensitivity=margins)


def _study(run: Run, question: ScaleQuestion) -> Study:
    # A pinned run fixes its micro-batch, which must not bind the planner at other sizes.
    request = request_for(run, fixed={}) if run.plan is not None else request_for(run)
    request = fixing(request, question.fixed)
    if run.plan is None:  # one set of switches for all sizes: that of the plan for the size which the run states
        request = search_with_software(request, goal=goal_of(run)).request
    tokens = run.train.tokens or (run.train.steps and run.train.steps * run.tokens_per_step)
    return Study(
        request=request,
        mode=question.mode,
        num_tokens=question.tokens or tokens,
        costs=run.costs,
        with_failures=question.failures,
    )


def _deadline(study: Study, days: float) -> Deadline:
    if study.num_tokens is None:
        raise InputError(
            "a deadline needs the length of the training", got=f"{days:g} days, and no number of tokens",
            hint="give --tokens, as in --tokens 1e12, or train.tokens in the run file",
        )  # fmt: skip
    return scaling.least_devices(study, days)


def _kept(study: Study, run: Run, sizes: Sequence[int]) -> Plan:
    """The plan to keep: the run's own, else the planner's for the first size that works."""
    return run.plan or _curve(study, [min(sizes)]).points[0].costed.plan


def _curve(study: Study, sizes: Sequence[int]) -> ScaleCurve:
    curve = scaling.scale(study, sizes)
    if not curve.points:
        first = curve.unreached[0]
        raise InfeasibleError(
            f"the run cannot be made on {first.num_devices:,} devices: {first.why_not}",
            hint="name other sizes with --devices, or leave the plan to the planner",
        )
    return curve


def _with_replicas(report: ScaleReport, num_devices: int, sizes: Sequence[int]) -> ScaleReport:
    request = scaling.request_at(report.study, num_devices)
    if isinstance(request, scaling.Unreached):
        raise InfeasibleError(f"{num_devices:,} devices: {request.why_not}")
    replicas = scaling.rank_replicas(request, sizes)
    if not replicas:
        raise InfeasibleError(
            f"no replica of {', '.join(f'{s:,}' for s in sizes)} devices works on {request.cluster.name}",
            hint="the replica must divide the devices, and the replicas the global batch",
        )
    return replace(report, replicas=replicas, replica_cluster=request.cluster.name)


def _costed(costed: scaling.Costed) -> dict[str, Any]:
    return {
        "num_devices": costed.num_devices,
        **_batch(costed.global_batch, costed.request.seq_len),
        **plan_document(costed.plan),
        "replica_devices": scaling.replica_devices(costed.plan),
        "num_micro_batches": costed.plan.num_micro_batches(costed.global_batch),
        "exposed_data_parallel_s": scaling.exposed_data_parallel_s(costed),
        **step_document(costed.estimate.step),
    }


def _point(point: scaling.ScalePoint) -> dict[str, Any]:
    return {
        **_costed(point.costed),
        **picked(point, "efficiency", "speedup", "goodput"),
        "training": point.training and training_document(point.training),
        **({} if point.simulation is None else {"simulation": point.simulation}),
    }


def _emulated(point: scaling.EmulatedPoint) -> dict[str, Any]:
    return {
        **picked(point, "num_devices", "efficiency", "real_efficiency", "difference_s", "why_not"),
        "emulated": _costed(point.emulated),
        "real": point.real and _costed(point.real),
    }


def _unreached(unreached: scaling.Unreached) -> dict[str, Any]:
    return {"num_devices": unreached.num_devices, "why_not": unreached.why_not}


def _batch(num_sequences: int, seq_len: int) -> dict[str, int]:
    return {"global_batch_sequences": num_sequences, "global_batch_tokens": num_sequences * seq_len}
