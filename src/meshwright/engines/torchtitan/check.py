"""Parts of a run that torchtitan 0.3.0 does not support, with reasons. Pure: torchtitan need not be installed.

Plans are checked with the planner's rules for this engine, so that the planner proposes only what the engine accepts.
Conditions on the machine (a CPU has no fp8) are checked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.torchtitan.config_module.models import GPT_OSS, check_model, family_of
from meshwright.specs.model import AttentionKind, Lora
from meshwright.specs.plan import Plan
from meshwright.specs.run import Evaluate, Run, StateFormat, Tracker

if TYPE_CHECKING:
    from meshwright.training.data import Corpus


def check(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that torchtitan 0.3.0 does not support; empty if it supports all."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run)]
    if run.lora is not None:
        problems += _lora(run.lora, run)
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _numbers(run: Run) -> Iterator[Unsupported]:
    yield from refusals.other_precisions(run)
    if run.precision.name == "fp32" and run.model.family == GPT_OSS:
        yield Unsupported(
            key="precision",
            reason="GPT-OSS's experts in torchtitan 0.3.0 always multiply in bf16",
            hint="precision: bf16",
        )
    if run.precision.name == "fp8_rowwise" and run.model.experts is not None:
        yield Unsupported(key="precision", reason="experts are not multiplied in fp8", hint="precision: bf16")
    if run.optimizer.states is StateFormat.INT8:
        yield Unsupported(key="optimizer.states", reason="AdamW has fp32 or bf16 states, not int8")
    if run.train.balance_loss:
        has_experts = run.model.experts is not None
        reason = "experts are balanced only by routing biases" if has_experts else f"{run.model.name} has no experts"
        yield Unsupported(key="train.balance_loss", reason=f"{reason}: must be 0")
    yield from refusals.router_z_loss(run)
    yield from refusals.regularisers(run)
    yield from refusals.absent_parts(run)


def _training(run: Run) -> Iterator[Unsupported]:
    yield from refusals.training(run, own=refusals.OF_OWN_DATA)
    yield from refusals.decisive_switches(run)
    evaluate, saves = run.train.evaluate, run.train.checkpoint
    if saves is not None and saves.keep == 1:
        yield Unsupported(
            key="train.checkpoint.keep", reason="torchtitan keeps at least two checkpoints: must be 2 or more"
        )
    if evaluate is not None and evaluate.target_loss is not None and saves and evaluate.every_steps % saves.every_steps:
        yield Unsupported(
            key="train.checkpoint.every_steps",
            reason="the step that reaches train.evaluate.target_loss would not be saved",
            hint=f"train.evaluate.every_steps, {evaluate.every_steps}, must be a multiple of it",
        )
    upstream = None if evaluate is None or has_own_validator(evaluate) else evaluate
    if upstream is not None and run.num_steps is not None and run.num_steps % upstream.every_steps:
        yield Unsupported(
            key="train.evaluate.every_steps",
            reason=f"nothing is evaluated at the end of {run.num_steps} steps",
            hint="train.steps must be a multiple of it",
        )
    if Tracker.MLFLOW in run.train.trackers:
        yield Unsupported(key="train.trackers", reason="mlflow is not supported", hint="allowed: tensorboard, wandb")


def has_own_validator(evaluate: Evaluate) -> bool:
    """Return True for evaluations that torchtitan's own validator does not have."""
    return evaluate.target_loss is not None or evaluate.skip_first > 0


def _lora(lora: Lora, run: Run) -> Iterator[Unsupported]:
    family = family_of(run.model)
    if run.model.attention.kind is AttentionKind.MLA or run.model.experts is not None:
        yield Unsupported(key="lora", reason="adapters are lowered only for dense models with grouped attention")
    elif family is not None and ("key" in lora.targets) != ("value" in lora.targets):
        yield Unsupported(key="lora.targets", reason="keys and values are adapted together or not at all")
    yield from refusals.plain_adapters(lora, "torchtitan")
    yield from refusals.quantised_base(lora, "TorchTitan's base is not quantised")


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """Parts of `plan` that torchtitan 0.3.0 does not support."""
    return [*refusals.by_planner_rules(plan, run=run, engine="torchtitan")]


def notes_on_data(run: Run, corpus: Corpus) -> Iterator[str]:
    """A note if an evaluation takes more samples than there are: the validator then repeats some."""
    evaluate, samples = run.train.evaluate, corpus.validation
    if evaluate is None or samples is None:
        return
    taken, whole = evaluate.batches_of(run.global_batch) * run.global_batch, samples.num_samples // run.global_batch
    if taken > samples.num_samples:
        yield (
            f"an evaluation takes {taken:,} sequences, and the validation data has {samples.num_samples:,}: torchtitan "
            f"counts some of them several times; train.evaluate.num_batches={max(1, whole)} takes each at most once"
        )
