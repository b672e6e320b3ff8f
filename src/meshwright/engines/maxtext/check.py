"""Parts of a run that MaxText 0.2.5 does not support, with reasons. Pure: MaxText need not be installed.

Plans are checked with the planner's rules for this engine, so that the planner proposes only what the engine accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.maxtext.config.models import check_model, is_gpt_oss, is_latent
from meshwright.specs.features import AttentionKernel
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan
from meshwright.specs.run import DecayShape, LearningRateSchedule, Run, StateFormat

SCHEDULES = (
    LearningRateSchedule.COSINE, LearningRateSchedule.LINEAR, LearningRateSchedule.WSD, LearningRateSchedule.CONSTANT,
)  # fmt: skip
"""Schedules that MaxText's `cosine` and `wsd` express."""


def check(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that MaxText does not support; empty if it supports all."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run)]
    if run.lora is not None:
        problems += _lora(run.lora, run)
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _numbers(run: Run) -> Iterator[Unsupported]:
    yield from refusals.other_precisions(run)
    if run.optimizer.states is not StateFormat.FP32:
        yield Unsupported(
            key="optimizer.states", reason="MaxText's second optimizer state is always fp32: must be fp32"
        )
    yield from refusals.other_schedules(run, SCHEDULES)
    falls = run.optimizer.schedule is LearningRateSchedule.WSD
    if falls and run.optimizer.decay_shape not in (DecayShape.LINEAR, DecayShape.COSINE):
        yield Unsupported(key="optimizer.decay_shape", reason="MaxText's decay is linear or a cosine")
    if run.train.balance_loss:
        yield Unsupported(
            key="train.balance_loss",
            reason="MaxText's is per batch and averaged over layers, not per sequence: must be 0",
        )
    yield from refusals.regularisers(run)
    yield from refusals.router_z_loss(run)
    yield from refusals.absent_parts(run)


def _training(run: Run) -> Iterator[Unsupported]:
    yield from refusals.training(run, own=("target_loss",))
    yield from refusals.decisive_switches(run)
    if is_gpt_oss(run.model) and run.stack.features.attention not in (None, AttentionKernel.UNFUSED):
        yield Unsupported(
            key="stack.attention",
            reason="among MaxText's kernels for GPUs only Transformer Engine's has sinks, and its environment lacks it",
            hint="stack.attention: unfused",
        )
    if run.train.trackers:
        yield Unsupported(
            key="train.trackers", reason="its environment has no TensorBoard and no Weights & Biases: leave it out"
        )


def _lora(lora: Lora, run: Run) -> Iterator[Unsupported]:
    if is_latent(run.model) or is_gpt_oss(run.model):
        what = "under latent attention" if is_latent(run.model) else "of modules with biases"
        yield Unsupported(key="lora.targets", reason=f"adapters {what} are not lowered")
    if run.model.experts is not None and (dense := set(lora.targets) & {"gate", "up", "down"}):
        yield Unsupported(key="lora.targets", reason=f"experts have no adapters: remove {', '.join(sorted(dense))}")
    yield from refusals.plain_adapters(lora, "MaxText")
    yield from refusals.quantised_base(lora, "MaxText quantises frozen weights in other blocks than Meshwright")


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """Parts of `plan` that MaxText does not support."""
    return [
        *refusals.by_planner_rules(replace(plan, layers_per_stage=None), run=run, engine="maxtext"),
        *refusals.applying(
            (plan.layers_per_stage is not None, "parallel.layers_per_stage", "MaxText's stages are equal: leave it out")
        ),
    ]


def num_accumulated(run: Run, plan: Plan) -> int:
    """Return the number of gradient accumulation steps."""
    return 1 if plan.pipeline > 1 else plan.num_micro_batches(run.global_batch)
