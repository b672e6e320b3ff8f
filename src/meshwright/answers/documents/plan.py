"""Parts of JSON documents on plans, which several answers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.answers.cluster import hardware_document
from meshwright.catalog.stacks import features_of
from meshwright.cost.memory import memory_parts
from meshwright.json_values import picked
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.remedies import word
from meshwright.specs.run import said_kernels
from meshwright.units import DAY_S

if TYPE_CHECKING:
    from meshwright.planner import PlanComparison, PlanRequest, WhyNot
    from meshwright.planner.explain import Difference
    from meshwright.planner.neighbours import Neighbour
    from meshwright.planner.switches import SwitchGain
    from meshwright.planner.training import Training
    from meshwright.specs.estimate import Estimate, MemoryEstimate, StepEstimate
    from meshwright.specs.plan import Plan
    from meshwright.specs.run import Run


def switch_document(other: SwitchGain) -> dict[str, Any]:
    """Other software: `changes` of the run file's stack section; `gain`: tokens/s, or by the run's
    objective tokens/USD or tokens/J, over the first plan's.
    """
    return {**plan_document(other.plan), "changes": dict(other.changes), "step_s": other.step_s, "gain": other.gain}


def neighbour_document(neighbour: Neighbour) -> dict[str, Any]:
    """A batch size or number of devices near the run's. `gain`: as of a switch."""
    return {
        **plan_document(neighbour.plan),
        "global_batch_sequences": neighbour.global_batch,
        "num_idle_devices": neighbour.num_idle,
        "tokens_per_s": neighbour.tokens_per_s,
        "gain": neighbour.gain,
    }


def parts_document(done: PlanEstimate) -> dict[str, Any]:
    """Pipeline ranks of each part of a cluster of several; empty where these do not lie on one part each."""
    if not done.shares:
        return {}
    parts = [
        {
            "cluster": share.part.name,
            "ranks": list(share.ranks),
            "layers": list(share.layers),
            "rank_s": share.rank_s,
            "reserved_bytes": share.reserved_bytes,
            "usable_bytes": share.budget.usable_bytes,
        }
        for share in done.shares
    ]
    return {"parts": parts}


def request_document(run: Run, request: PlanRequest) -> dict[str, Any]:
    """The question. Sequence length in tokens, batch in both counts, memory in bytes."""
    return {
        "run": run.name,
        "source": run.source,
        "model": request.model.name,
        "cluster": run.cluster_name,
        "accelerator": request.cluster.accelerator.name,
        "hardware": hardware_document(request.cluster),
        "num_devices": request.num_devices,
        "global_batch_sequences": request.global_batch,
        "global_batch_tokens": request.global_batch * request.seq_len,
        "sequence_length": request.seq_len,
        "task": run.task,
        "precision": request.precision.name,
        "engine": request.engine,
        "stack": {
            "framework": request.stack.framework,
            "vintage": request.stack.vintage,
            **features_of(request.stack, request.cluster.accelerator, precision=request.precision.name).stated(),
        },
        "objective": run.objective,
        "fixed": dict(request.fixed),
        "usable_bytes": request.usable_bytes,
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan in the run file's terms: `parallel` and `micro_batch`, and its short form."""
    from meshwright.runfile.pinned import section_from_plan

    return {
        "plan": plan.describe(),
        "parallel": section_from_plan(plan),
        "micro_batch": plan.micro_batch,
        **_kernels(plan),
        "num_devices": plan.num_devices,
    }


def _kernels(plan: Plan) -> dict[str, Any]:
    """Choices of kernels in the plan, as the `kernels` section has them; empty where there are none."""
    said = said_kernels(plan)
    return {"kernels": said} if said else {}


def step_document(step: StepEstimate) -> dict[str, Any]:
    """A step: estimates with interval, unit and tier, seconds by component, bytes by part."""
    from meshwright.answers.components import bound_by

    return {
        "estimate": {"step": step.step, "tokens_per_s_per_device": step.tokens_per_s_per_device, "mfu": step.mfu},
        **picked(step, "model_flops_per_token", "components_s", "details_s"),
        "bound_by": bound_by(step.components_s),
        "memory": memory_document(step.memory),
    }


def memory_document(memory: MemoryEstimate) -> dict[str, Any]:
    """Memory of the fullest device in bytes by part, and whether it fits."""
    return {
        "parts_bytes": memory_parts(memory),
        **picked(
            memory, "details_bytes", "allocated_bytes", "reserved_bytes", "capacity_bytes", "usable_bytes", "fits",
            "verdict", "fit_probability", "stage",
        ),
    }  # fmt: skip


def training_document(training: Training) -> dict[str, Any]:
    """A whole training, with and without its failures."""
    return {
        "num_tokens": round(training.num_tokens),
        "num_steps": training.num_steps,
        "days_of_steps": _days(training.productive),
        "days": _days(training.wall),
        "energy": training.energy,
        "cost": training.cost,
    }


def _days(seconds: Estimate) -> dict[str, object]:
    ends = {name: getattr(seconds, name) / DAY_S for name in ("value", "low", "high")}
    return {**seconds.as_json(), **ends, "unit": "days"}


def comparison_document(comparison: PlanComparison) -> dict[str, Any]:
    """Two plans against each other; a difference is the loser's number minus the winner's."""
    return {
        "winner": plan_document(comparison.winner.plan),
        "loser": plan_document(comparison.loser.plan),
        "step_ms": _difference(comparison.step_ms),
        "components_ms": {d.name: _difference(d) for d in comparison.components_ms},
        "memory_gib": {d.name: _difference(d) for d in comparison.memory_gib},
        "headroom_gib": _difference(comparison.headroom_gib),
        "decided_by": comparison.decided_by.name,
        "text": loser_sentence(comparison),
    }


def why_not_document(answer: WhyNot) -> dict[str, Any]:
    """The answer to "why not"."""
    return {
        "fixed": dict(answer.fixed),
        "verdict": answer.verdict,
        "text": why_not_sentence(answer),
        "comparison": answer.comparison and comparison_document(answer.comparison),
        "needed_gib": answer.infeasible and answer.infeasible.needed_gib,
        "available_gib": answer.infeasible and answer.infeasible.available_gib,
        "violations": [str(v) for v in answer.violations],
        "forced": list(answer.forced),
        "remedies": [
            {"changes": list(r.changes), "plan": r.plan.describe(), "step_ratio": r.ratio} for r in answer.remedies
        ],
    }


def loser_sentence(comparison: PlanComparison) -> str:
    """One line: how much slower the second plan is, the component that decides, the difference of memory."""
    from meshwright.answers.components import label

    step, cause = comparison.step_ms, comparison.decided_by
    gib = comparison.headroom_gib.winner - comparison.headroom_gib.loser
    text = "the same memory" if abs(gib) < 0.05 else f"{abs(gib):.1f} GiB {'more' if gib > 0 else 'less'} memory"
    pace = "slower" if step.delta >= 0 else "faster"
    decides = f"{label(cause.name)} {cause.delta:+,.1f} ms decides, " if step.delta > 0 else ""
    if step.delta < 0 and comparison.loser.rank > comparison.winner.rank:
        decides = "too little for activations in 8 bits, which must gain 1 %, "
    return (
        f"{comparison.loser.plan.describe()}: {abs(step.delta):,.1f} ms {pace} "
        f"({100 * step.delta / step.winner:+z.1f} %), {decides}{text}"
    )


def why_not_sentence(answer: WhyNot) -> str:
    """One line: the verdict on the fixed fields and its reason."""
    what = ", ".join(f"{name}={word(name, value)}" for name, value in answer.fixed.items())
    return f"{what}: {outcome_sentence(answer)}"


def outcome_sentence(answer: WhyNot) -> str:
    """The verdict and its reason."""
    if answer.comparison is not None:
        said = f"{answer.verdict.value}. {loser_sentence(answer.comparison)}"
    elif answer.infeasible is not None:
        said = answer.infeasible.binding
    else:
        said = f"{answer.verdict.value}. {'; '.join(map(str, answer.violations)) or 'no plan has it'}"
    return "; ".join((said, *answer.reasons))


def _difference(difference: Difference) -> dict[str, float]:
    return {"winner": difference.winner, "loser": difference.loser, "delta": difference.delta}
