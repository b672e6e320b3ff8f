"""What MaxText 0.2.5 cannot do of a run, with the reason. Pure: MaxText need not be installed.

Plans are judged by the planner's rules of this engine, so that what is searched is what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.tables import BatchTable, model_row
from meshwright.engines.base import Unsupported
from meshwright.engines.maxtext.models import check_model
from meshwright.planner.engines import engine_facts
from meshwright.planner.legality import violations
from meshwright.planner.rules import Setting, Severity
from meshwright.specs.plan import Offload, Plan, Recompute, Sharding
from meshwright.specs.run import BIAS_RATE, Engine, FaultAction, Run, StateFormat

PRECISIONS = ("fp32", "bf16")


def check(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that MaxText cannot do; empty when it does all of it."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run), *_steps(run)]
    if run.lora is not None:
        problems.append(
            Unsupported(key="lora", reason="adapters are not lowered: MaxText trains them elsewhere")
        )
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _numbers(run: Run) -> Iterator[Unsupported]:
    if run.precision.name not in PRECISIONS:
        yield Unsupported(
            key="precision",
            reason=f"{run.precision.name} is not lowered",
            hint=f"allowed: {', '.join(PRECISIONS)}",
        )
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
    if run.train.balance_bias_rate != BIAS_RATE:
        yield Unsupported(key="train.balance_bias_rate", reason=f"{run.model.name} has no routing biases")


def _steps(run: Run) -> Iterator[Unsupported]:
    if run.num_steps is None:
        yield Unsupported(
            key="train", reason="says neither steps nor tokens", hint="for example --set train.steps=100"
        )


def _training(run: Run) -> Iterator[Unsupported]:
    if run.gemm_tuning is not None:
        yield Unsupported(key="gemm_tuning", reason="tuned products are the native engine's: leave it out")
    if run.data.workers is not None:
        yield Unsupported(key="data.workers", reason="MaxText's own threads read ahead: leave it out")
    if run.train.trackers:
        yield Unsupported(
            key="train.trackers",
            reason="its environment has no TensorBoard and no Weights & Biases: leave it out",
        )
    faults = run.train.faults
    if faults.not_finite is not FaultAction.STOP:
        yield Unsupported(
            key="train.faults.not_finite", reason="a loss that is no number ends the training: must be stop"
        )
    if faults.spike is not FaultAction.IGNORE:
        yield Unsupported(
            key="train.faults.spike", reason="MaxText judges spikes by its own rule: must be ignore"
        )
    if run.train.evaluate is not None:
        yield Unsupported(
            key="train.evaluate",
            reason="MaxText 0.2.5 empties its file of metrics when it evaluates, and steps would be lost: leave it out",
        )


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """What MaxText cannot do of `plan`."""
    setting = Setting(
        model=model_row(run.model, lora=run.lora),
        batch=BatchTable(seq_len=run.sequence_length, global_batch=run.global_batch),
        num_devices=plan.num_devices,
        domain=plan.num_devices,
        facts=engine_facts(Engine.MAXTEXT),
    )
    judged = violations(plan, setting=setting)
    problems = [
        Unsupported(key="parallel", reason=v.message) for v in judged if v.severity is Severity.REFUSED
    ]
    return [*problems, *_plan_details(plan, run)]


def _plan_details(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.offload is not Offload.NONE:
        yield Unsupported(key="parallel.offload", reason="is not lowered: must be none")
    if plan.layers_per_stage is not None:
        yield Unsupported(key="parallel.layers_per_stage", reason="MaxText's stages are equal: leave it out")
    if plan.recompute is Recompute.FULL and plan.recompute_layers is not None:
        yield Unsupported(
            key="parallel.recompute.layers", reason="all layers are recomputed or none: leave it out"
        )
    if plan.sharding is not Sharding.PARAMETERS and plan.context * plan.expert > 1:
        yield Unsupported(
            key="parallel.sharding",
            reason="MaxText shards weights over its context and expert axes too",
            hint="sharding: parameters",
        )
    if run.model.experts is not None and plan.tensor > 1 and plan.sequence_parallel:
        yield Unsupported(
            key="parallel.sequence_parallel",
            reason="with experts MaxText's `tensor_sequence` axis gives other losses than one device: must be false",
            hint="parallel.sequence_parallel: false",
        )
    is_accumulated = plan.pipeline == 1 and plan.num_micro_batches(run.global_batch) > 1
    if plan.sharding is Sharding.OPTIMIZER and is_accumulated and run.precision.name == "fp32":
        yield Unsupported(
            key="parallel.sharding",
            reason="MaxText rounds weights to bf16 when it accumulates gradients under a sharded optimizer",
            hint="batch.micro as large as the batch of a device, or sharding: parameters",
        )
