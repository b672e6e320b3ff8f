"""What torchtitan 0.3.0 cannot do of a run, with the reason. Pure: torchtitan need not be installed.

Plans are judged by the planner's rules of this engine, so that what is searched is what is accepted. What depends on
the machine (a CPU has no fp8) is asked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost.stages import layers_per_stage
from meshwright.cost.tables import BatchTable, model_row
from meshwright.engines.base import Unsupported
from meshwright.engines.torchtitan.models import GPT_OSS, check_model, family_of
from meshwright.planner.engines import engine_facts
from meshwright.planner.legality import violations
from meshwright.planner.rules import Setting, Severity
from meshwright.specs.model import AttentionKind, BaseFormat, Lora, Router
from meshwright.specs.plan import Offload, Plan, Recompute
from meshwright.specs.run import BIAS_RATE, Engine, FaultAction, Run, StateFormat, Tracker

PRECISIONS = ("fp32", "bf16", "fp8_rowwise")


def check(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that torchtitan 0.3.0 cannot do; empty when it does all of it."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run), *_outcomes(run)]
    if run.lora is not None:
        problems += _lora(run.lora, run)
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _numbers(run: Run) -> Iterator[Unsupported]:
    if run.precision.name not in PRECISIONS:
        hint = (
            "precision: fp8_rowwise" if run.precision.matmul == "fp8" else f"allowed: {', '.join(PRECISIONS)}"
        )
        yield Unsupported(key="precision", reason=f"{run.precision.name} is not lowered", hint=hint)
    if run.precision.name == "fp32" and run.model.family == GPT_OSS:
        yield Unsupported(
            key="precision",
            reason="GPT-OSS's experts of torchtitan 0.3.0 multiply in bf16, whatever the precision",
            hint="precision: bf16",
        )
    if run.precision.name == "fp8_rowwise" and run.model.experts is not None:
        yield Unsupported(key="precision", reason="experts are not multiplied in fp8", hint="precision: bf16")
    if run.optimizer.states is StateFormat.INT8:
        yield Unsupported(key="optimizer.states", reason="AdamW keeps fp32 or bf16 states: int8 is not there")
    if run.train.z_loss:
        yield Unsupported(key="train.z_loss", reason="the loss is plain cross-entropy: must be 0")
    x = run.model.experts
    if run.train.balance_loss:
        reason = "experts are balanced by routing biases alone" if x else f"{run.model.name} has no experts"
        yield Unsupported(key="train.balance_loss", reason=f"{reason}: must be 0")
    if run.train.balance_bias_rate != BIAS_RATE and (x is None or x.router is not Router.SIGMOID):
        yield Unsupported(key="train.balance_bias_rate", reason=f"{run.model.name} has no routing biases")


def _training(run: Run) -> Iterator[Unsupported]:
    if run.num_steps is None:
        yield Unsupported(
            key="train", reason="says neither steps nor tokens", hint="for example --set train.steps=100"
        )
    if run.gemm_tuning is not None:
        yield Unsupported(key="gemm_tuning", reason="tuned products are the native engine's: leave it out")
    if run.data.workers is not None:
        yield Unsupported(key="data.workers", reason="one thread reads ahead: leave it out")
    faults, evaluate, saves = run.train.faults, run.train.evaluate, run.train.checkpoint
    if faults.not_finite is not FaultAction.STOP:
        yield Unsupported(
            key="train.faults.not_finite", reason="a loss that is no number ends the training: must be stop"
        )
    if faults.spike is not FaultAction.IGNORE:
        yield Unsupported(key="train.faults.spike", reason="spikes are not looked for: must be ignore")
    if saves is not None and saves.keep == 1:
        yield Unsupported(
            key="train.checkpoint.keep", reason="two checkpoints are kept at least: must be 2 or more"
        )
    if evaluate is None:
        return
    if evaluate.workers is not None:
        yield Unsupported(key="train.evaluate.workers", reason="one thread reads ahead: leave it out")
    if evaluate.target_loss is not None:
        yield Unsupported(key="train.evaluate.target_loss", reason="training ends after its steps only")
    if run.data.source == "synthetic" and run.data.validation is None:
        yield Unsupported(key="train.evaluate", reason="random tokens have nothing to validate on")
    if run.num_steps is not None and run.num_steps % evaluate.every_steps:
        yield Unsupported(
            key="train.evaluate.every_steps",
            reason=f"nothing is evaluated at the end of {run.num_steps} steps",
            hint="train.steps must be a multiple of it",
        )


def _outcomes(run: Run) -> Iterator[Unsupported]:
    if Tracker.MLFLOW in run.train.trackers:
        yield Unsupported(
            key="train.trackers", reason="mlflow is not there", hint="allowed: tensorboard, wandb"
        )


def _lora(lora: Lora, run: Run) -> Iterator[Unsupported]:
    family = family_of(run.model)
    if run.model.attention.kind is AttentionKind.MLA or run.model.experts is not None:
        yield Unsupported(key="lora", reason="adapters are lowered for dense models with grouped attention")
    elif family is not None and ("key" in lora.targets) != ("value" in lora.targets):
        yield Unsupported(key="lora.targets", reason="keys and values are adapted both or not at all")
    if lora.dropout:
        yield Unsupported(key="lora.dropout", reason="adapters have no dropout: must be 0")
    if lora.base_format is not BaseFormat.FULL:
        yield Unsupported(key="lora.base_format", reason="the base is not quantised: must be full")


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """What torchtitan 0.3.0 cannot do of `plan`."""
    setting = Setting(
        model=model_row(run.model, lora=run.lora),
        batch=BatchTable(seq_len=run.sequence_length, global_batch=run.global_batch),
        num_devices=plan.num_devices,
        domain=plan.num_devices,
        facts=engine_facts(Engine.TORCHTITAN),
    )
    # Any split of the layers can be run; the rule on it is about what can be costed.
    judged = violations(replace(plan, layers_per_stage=None), setting=setting)
    problems = [
        Unsupported(key="parallel", reason=v.message) for v in judged if v.severity is Severity.REFUSED
    ]
    return [*problems, *_plan_details(plan, run)]


def _plan_details(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.offload is not Offload.NONE:
        yield Unsupported(key="parallel.offload", reason="is not lowered: must be none")
    if plan.recompute is Recompute.FULL and plan.recompute_layers is not None:
        yield Unsupported(
            key="parallel.recompute.layers", reason="all layers are recomputed or none: leave it out"
        )
    if run.model.tied_embeddings and plan.pipeline > 1:
        yield Unsupported(key="parallel.pipeline", reason="tied embeddings need the whole model: must be 1")
    if run.model.experts is not None and plan.tensor > 1 and plan.sequence_parallel and plan.micro_batch == 1:
        yield Unsupported(
            key="parallel.sequence_parallel",
            reason="experts get wrong gradients from micro-batches of one sequence: must be false",
            hint="or batch.micro: 2",
        )
    num_stages = plan.pipeline * plan.virtual_pipeline
    if 0 in (plan.layers_per_stage or layers_per_stage(run.model.num_layers, num_stages)):
        yield Unsupported(
            key="parallel.pipeline",
            reason=f"every stage needs a layer, and {num_stages} do not share {run.model.num_layers} so",
            hint="set parallel.layers_per_stage",
        )
