"""The estimate of one run: its plan, its step, and the whole training with failures, energy and money."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from meshwright.answers.components import family
from meshwright.answers.documents.plan import plan_document, request_document, step_document, training_document
from meshwright.answers.economics import Economics, economics_of
from meshwright.answers.memory_over_time import MemoryOverTime, memory_over_time
from meshwright.answers.quantities import fit_text, rate, value_of
from meshwright.answers.stages import stage_rows
from meshwright.catalog.prices import market_prices
from meshwright.cost.memory import memory_parts
from meshwright.engines.choice import notes_on_engine, with_planned_engine
from meshwright.errors import InfeasibleError
from meshwright.json_values import jsonable, picked
from meshwright.planner import request_for, violations
from meshwright.planner.choice import best_plans, goal_of
from meshwright.planner.engines import Severity
from meshwright.planner.estimate import PlanEstimate, estimate_plan, notes_on_gaps
from meshwright.planner.host_memory import LARGER_HOST, host_shortfall, notes_on_host_memory
from meshwright.planner.legality import legality_context
from meshwright.planner.parts import notes_on_parts
from meshwright.planner.rank_memory import RankMemory, memory_of_ranks
from meshwright.planner.request import PlanRequest, note_on_labels
from meshwright.planner.search import PlanResult
from meshwright.planner.switches import notes_on_idle_switches
from meshwright.result import Result
from meshwright.specs.estimate import Estimate, MemoryEstimate
from meshwright.specs.memory_budget import FitVerdict
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run, with_software
from meshwright.units import gib


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunEstimate(Result):
    """The estimate of one run.

    Attributes:
        run: the run that was estimated.
        request: the question that the planner was asked.
        estimate: plan, step, memory, uncertainty by input, and the pipeline's timeline.
        economics: goodput, energy and cost of the whole training.
        chosen: the planner's search if the run leaves its plan open, else None.
        notes: cautions for the reader.
    """

    run: Run
    request: PlanRequest
    estimate: PlanEstimate
    economics: Economics
    chosen: PlanResult | None  # the search, when the run file left the plan to the planner
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan that was estimated."""
        return self.estimate.plan

    @property
    def step(self) -> Estimate:
        """Time of one optimizer step, in seconds."""
        return self.estimate.step.step

    @property
    def tokens_per_s_per_device(self) -> Estimate:
        """Throughput of one device."""
        return self.estimate.step.tokens_per_s_per_device

    @property
    def mfu(self) -> Estimate:
        """Model FLOPs utilization as a ratio: causal attention, dense peak, no recomputation."""
        return self.estimate.step.mfu

    @property
    def components_s(self) -> dict[str, float]:
        """Seconds of the step by component; their sum is the step."""
        return self.estimate.step.components_s

    @property
    def memory(self) -> MemoryEstimate:
        """Bytes per device on the fullest pipeline stage."""
        return self.estimate.step.memory

    @functools.cached_property
    def memory_of_ranks(self) -> list[RankMemory]:
        """Bytes per device of every pipeline rank by part, the first one first."""
        return memory_of_ranks(self.request, self.plan)

    @functools.cached_property
    def memory_over_time(self) -> MemoryOverTime | None:
        """Bytes of the fullest rank by part during one step; None if its pipeline is too long to simulate."""
        return memory_over_time(self.request, self.estimate)

    def to_dict(self) -> dict[str, Any]:
        from meshwright.answers.provenance import sources_of

        economics = self.economics
        document = {
            "request": request_document(self.run, self.request),
            "chosen_by": "planner" if self.chosen else "run file",
            **plan_document(self.plan),
            **step_document(self.estimate.step),
            "stages": stage_rows(self.request, self.estimate),
            "memory_of_ranks": self.memory_of_ranks,
            "memory_peak": self.memory_over_time and self.memory_over_time.peak,
            "uncertainty": self.estimate.uncertainty,
            **picked(economics, "goodput", "usd_per_device_hour", "usd_per_million_tokens", "joule_per_token"),
            "market_prices": [
                p
                for p in market_prices()
                if p.accelerator == self.request.cluster.accelerator.name and not self.request.cluster.is_mixed
            ],
            "totals": economics.totals and training_document(economics.totals),
            "notes": self.notes,
            "sources": {topic: str(source) for topic, source in sources_of(self.request, economics).items()},
        }
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each component of the step: name, family, seconds, share of the step."""
        return [
            {"component": n, "family": family(n).value, "seconds": s, "share_ratio": s / self.step.value}
            for n, s in self.components_s.items()
        ]

    def summary(self) -> str:
        """Return model, cluster, plan, step time, throughput and MFU."""
        tokens = self.tokens_per_s_per_device
        return (
            f"{self.request.model.name} on {self.run.cluster_name}, {self.plan.describe()}: "
            f"{value_of(self.step)} a step, {rate(tokens.value)} tokens/s/device "
            f"({rate(tokens.low)} to {rate(tokens.high)}), MFU {value_of(self.mfu)}"
        )


def estimate_run(run: Run) -> RunEstimate:
    """Estimate the run's plan, or the planner's best one for `parallel: auto`.

    A run that names no engine is one of `any` where the default does not run it, as it is planned.
    Raises InfeasibleError when no plan is possible, or when the pinned one is illegal or does not fit.
    """
    of_engine, run = notes_on_engine(run), with_planned_engine(run) if run.is_engine_open else run
    request = request_for(run)
    chosen = None
    if run.plan is None:
        chosen = best_plans(request, goal=goal_of(run))
        request, run = chosen.request, with_software(run, chosen.request.stack)
    plan = run.plan or chosen.plans[0].plan  # pyright: ignore[reportOptionalMemberAccess]
    warnings = require_legal(request, plan)
    estimate = estimate_plan(request, plan)
    require_fit(request, estimate)
    notes = [*note_on_labels(run), *notes_on_parts(request, estimate.plan)]
    notes += notes_on_idle_switches(request, estimate.plan)
    notes += notes_on_host_memory(request, estimate.plan)
    notes += notes_on_fit(estimate)
    return RunEstimate(
        run=run,
        request=request,
        estimate=estimate,
        economics=economics_of(run, request, estimate),
        chosen=chosen,
        notes=(*of_engine, *warnings, *(notes + notes_on_gaps(request))),
    )


def require_legal(request: PlanRequest, plan: Plan) -> list[str]:
    """Warnings about `plan`. Raises InfeasibleError with every rule of the engine that it breaks."""
    found = violations(plan, context=legality_context(request))
    refused = [v for v in found if v.severity is Severity.REFUSED]
    if refused:
        raise InfeasibleError(
            f"{plan.describe()} is no plan for engine {request.engine}: {'; '.join(map(str, refused))}",
            hint="`parallel: auto` lets the planner choose a legal plan",
        )
    return [str(v) for v in found]


def require_fit(request: PlanRequest, estimate: PlanEstimate) -> None:
    """Raise InfeasibleError with the bytes needed and available when the plan does not fit a device or its host."""
    memory = estimate.step.memory
    if memory.verdict is not FitVerdict.DOES_NOT_FIT:
        if short := host_shortfall(request, estimate.plan):
            raise InfeasibleError(short, hint=f"{LARGER_HOST}; `meshwright plan` finds plans that fit")
        return
    parts = ", ".join(f"{n} {gib(b):.1f}" for n, b in memory_parts(memory).items() if b > 0)
    raise InfeasibleError(
        f"device memory: {estimate.plan.describe()} needs {gib(memory.reserved_bytes):.1f} GiB on pipeline "
        f"stage {memory.stage}, {request.cluster.accelerator.name} has {gib(memory.capacity_bytes):.1f} GiB, "
        f"of which a plan may reserve {gib(memory.usable_bytes):.1f}",
        hint=f"of these GiB, {parts}; `meshwright plan` finds plans that fit",
    )


def notes_on_fit(estimate: PlanEstimate) -> list[str]:
    """Note on a plan that only may fit: what it needs, and with which probability it fits."""
    memory = estimate.step.memory
    if memory.verdict is not FitVerdict.MAY_FIT:
        return []
    return [
        f"the plan {fit_text(memory)}: by its estimate it needs "
        f"{gib(memory.reserved_bytes):.1f} GiB on pipeline stage {memory.stage}, and may reserve "
        f"{gib(memory.usable_bytes):.1f}; `meshwright plan` finds plans that fit"
    ]
