"""What MaxText 0.2.5 cannot do of a run, with the reason. Pure: MaxText need not be installed.

Plans are judged by the planner's rules of this engine, so that what is searched is what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.maxtext.config.models import check_model, is_gpt_oss, is_latent
from meshwright.specs.model import BaseFormat, Lora
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run, StateFormat

PRECISIONS = ("fp32", "bf16")


def check(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that MaxText cannot do; empty when it does all of it."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run)]
    if run.lora is not None:
        problems += _lora(run.lora, run)
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _numbers(run: Run) -> Iterator[Unsupported]:
    yield from refusals.other_precisions(run, allowed=PRECISIONS)
    if run.optimizer.states is not StateFormat.FP32:
        yield Unsupported(
            key="optimizer.states",
            reason="MaxText keeps the second moment in fp32, whatever the first is: fp32 only",
        )
    if run.train.z_loss:
        yield Unsupported(key="train.z_loss", reason="MaxText adds it to the loss that it reports: must be 0")
    if run.train.balance_loss:
        yield Unsupported(
            key="train.balance_loss",
            reason="MaxText's is of whole batches and the mean of the layers, not of every sequence: must be 0",
        )
    yield from refusals.absent_routing_biases(run)


def _training(run: Run) -> Iterator[Unsupported]:
    yield from refusals.unsupported_config(run)
    yield from refusals.endless(run)
    yield from refusals.keys_of_the_native_engine(run, has_target=True)
    yield from refusals.nothing_to_validate_on(run)
    if run.train.trackers:
        yield Unsupported(
            key="train.trackers",
            reason="its environment has no TensorBoard and no Weights & Biases: leave it out",
        )


def _lora(lora: Lora, run: Run) -> Iterator[Unsupported]:
    if is_latent(run.model) or is_gpt_oss(run.model):
        what = "of latents, and of what is made of them," if is_latent(run.model) else "beside biases"
        yield Unsupported(key="lora.targets", reason=f"adapters {what} are not lowered")
    if run.model.experts is not None and (dense := set(lora.targets) & {"gate", "up", "down"}):
        yield Unsupported(
            key="lora.targets",
            reason=f"experts have no adapters: {', '.join(sorted(dense))} must not be there",
        )
    if lora.dropout:
        yield Unsupported(key="lora.dropout", reason="MaxText's adapters have no dropout: must be 0")
    if lora.base_format is not BaseFormat.FULL:
        yield Unsupported(
            key="lora.base_format",
            reason="MaxText rounds frozen weights in other blocks than Meshwright: must be full",
        )


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """What MaxText cannot do of `plan`."""
    return [
        *refusals.by_planner_rules(plan, run=run, engine="maxtext"),
        *refusals.offload(plan),
        *_plan_details(plan, run),
    ]


def _plan_details(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.layers_per_stage is not None:
        yield Unsupported(key="parallel.layers_per_stage", reason="MaxText's stages are equal: leave it out")
    if run.lora is not None and plan.pipeline > 1:
        yield Unsupported(
            key="parallel.pipeline",
            reason="adapters of stages: MaxText finds the modules that have one by passing one token through the "
            "model, which its pipeline cannot divide into micro-batches: must be 1",
        )
    yield from refusals.some_layers_recomputed(plan)
    if plan.sharding is not Sharding.PARAMETERS and plan.context * plan.expert > 1:
        yield Unsupported(
            key="parallel.sharding",
            reason="MaxText shards weights over its context and expert axes too",
            hint="--set parallel.sharding=parameters",
        )
    if run.model.experts is not None and plan.tensor > 1 and plan.sequence_parallel:
        yield Unsupported(
            key="parallel.sequence_parallel",
            reason="with experts MaxText's `tensor_sequence` axis gives other losses than one device: must be false",
            hint="--set parallel.sequence_parallel=false",
        )
    is_accumulated = run.lora is None and num_accumulated(run, plan) > 1
    if plan.sharding is Sharding.OPTIMIZER and is_accumulated and run.precision.name == "fp32":
        yield Unsupported(
            key="parallel.sharding",
            reason="MaxText rounds weights to bf16 when it accumulates gradients under a sharded optimizer",
            hint="--set parallel.sharding=parameters, or batch.micro as large as the batch of a device",
        )


def num_accumulated(run: Run, plan: Plan) -> int:
    """Passes of a step whose gradients MaxText adds up."""
    return 1 if plan.pipeline > 1 else plan.num_micro_batches(run.global_batch)
