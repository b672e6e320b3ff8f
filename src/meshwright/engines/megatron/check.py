"""What Megatron-Core 0.16 cannot do of a run, with the reason. Pure: Megatron need not be installed.

Plans are judged by the planner's rules of this engine, so that what is searched is what is accepted. What depends on
the machine is asked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost.tables import BatchTable, model_row
from meshwright.engines.base import Unsupported
from meshwright.planner.engines import engine_facts
from meshwright.planner.legality import violations
from meshwright.planner.rules import Setting, Severity
from meshwright.specs.model import AttentionKind, Experts, Model, Rope, RopeScaling, Router
from meshwright.specs.plan import Offload, Plan, Recompute, Sharding
from meshwright.specs.run import BIAS_RATE, Engine, FaultAction, Run, StateFormat, Task

PRECISIONS = ("fp32", "bf16")
LLAMA3_CONTEXT = 8192  # what Megatron's stretching of Llama 3.1 takes for granted, with 1 and 4


def check(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that Megatron-Core 0.16 cannot do; empty when it does all of it."""
    problems = [*check_model(run.model), *_numbers(run), *_training(run)]
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def check_model(model: Model) -> Iterator[Unsupported]:
    """Why GPTModel cannot be `model`."""
    a = model.attention
    for wrong, what in (
        (model.norm_bias, "LayerNorm"),
        (not model.gated_ffn, "feed-forward blocks without a gate"),
        (model.learned_positions > 0, "learned positions"),
        (a.bias, "biases"),
        (a.num_windowed_layers > 0, "sliding windows"),
        (model.num_mtp_layers > 0, "multi-token prediction modules"),
        (model.family == "GptOssForCausalLM", "attention sinks"),
        (a.kind is AttentionKind.MLA, "latent attention, which needs Transformer Engine,"),
    ):
        if wrong:
            yield Unsupported(key="model", reason=f"{what} of {model.name} are not lowered")
    if a.kind is AttentionKind.GQA and a.v_dim != a.head_dim:
        yield Unsupported(key="model", reason=f"values of {model.name} are not as wide as its keys")
    yield from _rope(model.rope)
    if model.experts is not None:
        yield from _experts(model.experts)


def _rope(rope: Rope) -> Iterator[Unsupported]:
    if rope.scaling not in (RopeScaling.NONE, RopeScaling.LLAMA3):
        yield Unsupported(key="model", reason="rotary frequencies are stretched by llama3 or not at all")
    fixed = (rope.original_context, rope.low_frequency, rope.high_frequency)
    if rope.scaling is RopeScaling.LLAMA3 and fixed != (LLAMA3_CONTEXT, 1.0, 4.0):
        yield Unsupported(
            key="model",
            reason=f"Megatron stretches Llama's positions from {LLAMA3_CONTEXT} tokens, with frequencies 1 and 4",
        )


def _experts(x: Experts) -> Iterator[Unsupported]:
    sigmoid = x.router is Router.SIGMOID
    if sigmoid and not x.normalize_top_k:
        yield Unsupported(key="model", reason="Megatron normalises the weights of sigmoid routers")
    best = 2 if sigmoid else 1
    if x.num_groups and x.top_k // max(1, x.groups_per_token) != best:
        yield Unsupported(
            key="model",
            reason=f"Megatron judges a group by its {x.top_k // max(1, x.groups_per_token)} best experts, "
            f"the model by {best}",
        )


def _numbers(run: Run) -> Iterator[Unsupported]:
    if run.precision.name not in PRECISIONS:
        reason = f"{run.precision.name} needs Transformer Engine, which is not used"
        yield Unsupported(key="precision", reason=reason, hint=f"allowed: {', '.join(PRECISIONS)}")
    if run.optimizer.states is not StateFormat.FP32:
        yield Unsupported(
            key="optimizer.states", reason="narrow states need Transformer Engine: must be fp32"
        )
    if run.train.z_loss:
        yield Unsupported(key="train.z_loss", reason="the loss is plain cross-entropy: must be 0")
    x = run.model.experts
    if run.train.balance_loss:
        yield Unsupported(
            key="train.balance_loss", reason="is not lowered: must be 0",
            hint="Megatron's auxiliary losses count micro-batches, not sequences of the global batch",
        )  # fmt: skip
    if run.train.balance_bias_rate != BIAS_RATE and (x is None or x.router is not Router.SIGMOID):
        yield Unsupported(key="train.balance_bias_rate", reason=f"{run.model.name} has no routing biases")


def _training(run: Run) -> Iterator[Unsupported]:
    faults, evaluate = run.train.faults, run.train.evaluate
    if run.task is not Task.PRETRAIN:
        yield Unsupported(key="task", reason="Megatron-Core has no adapters: must be pretrain")
    if run.num_steps is None:
        yield Unsupported(
            key="train", reason="says neither steps nor tokens", hint="for example --set train.steps=100"
        )
    if run.train.compile:
        yield Unsupported(key="train.compile", reason="is not lowered: must be false")
    if run.gemm_tuning is not None:
        yield Unsupported(key="gemm_tuning", reason="tuned products are the native engine's: leave it out")
    if run.data.workers is not None:
        yield Unsupported(key="data.workers", reason="one thread reads ahead: leave it out")
    if faults.not_finite is not FaultAction.STOP:
        yield Unsupported(
            key="train.faults.not_finite", reason="a loss that is no number ends the training: must be stop"
        )
    if faults.spike is not FaultAction.IGNORE:
        yield Unsupported(key="train.faults.spike", reason="spikes are not looked for: must be ignore")
    if run.train.checkpoint is not None and run.train.checkpoint.asynchronous:
        yield Unsupported(
            key="train.checkpoint.asynchronous", reason="the loop waits for every checkpoint: must be false",
            hint="--set train.checkpoint.asynchronous=false",
        )  # fmt: skip
    if run.train.trackers:
        yield Unsupported(key="train.trackers", reason="the step log alone is written: leave it out")
    if evaluate is None:
        return
    if evaluate.workers is not None:
        yield Unsupported(key="train.evaluate.workers", reason="one thread reads ahead: leave it out")
    if evaluate.target_loss is not None:
        yield Unsupported(key="train.evaluate.target_loss", reason="training ends after its steps only")
    if run.data.source == "synthetic" and run.data.validation is None:
        yield Unsupported(key="train.evaluate", reason="random tokens have nothing to validate on")


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """What Megatron-Core 0.16 cannot do of `plan`."""
    setting = Setting(
        model=model_row(run.model, lora=run.lora),
        batch=BatchTable(seq_len=run.sequence_length, global_batch=run.global_batch),
        num_devices=plan.num_devices,
        domain=plan.num_devices,
        facts=engine_facts(Engine.MEGATRON),
    )
    # Any split of the layers can be run; the rule on it is about what can be costed.
    judged = violations(replace(plan, layers_per_stage=None), setting=setting)
    problems = [
        Unsupported(key="parallel", reason=v.message) for v in judged if v.severity is Severity.REFUSED
    ]
    return [*problems, *_plan_details(plan, run)]


def _plan_details(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.context > 1:
        yield Unsupported(
            key="parallel.context",
            reason="needs attention of Transformer Engine, which is not used: must be 1",
        )
    if plan.offload is not Offload.NONE:
        yield Unsupported(key="parallel.offload", reason="is not lowered: must be none")
    if plan.sharding is Sharding.PARAMETERS:
        yield Unsupported(
            key="parallel.sharding", reason="sharded parameters are not lowered",
            hint="allowed: none, optimizer",
        )  # fmt: skip
    if plan.data_replicate > 1:
        yield Unsupported(
            key="parallel.data_replicate", reason="the optimizer is shared by all of data_shard: must be 1"
        )
    if run.model.experts is not None and plan.expert == 1 and plan.expert_tensor != plan.tensor:
        yield Unsupported(
            key="parallel.expert_tensor",
            reason="without expert parallelism Megatron does not add up the gradients of experts over tensor ranks: "
            f"must be {plan.tensor}",
            hint=f"parallel.expert: {plan.tensor} divides them over the same ranks",
        )
    if run.model.attention.num_kv_heads % plan.tensor:
        yield Unsupported(
            key="parallel.tensor",
            reason=f"{plan.tensor} does not divide the {run.model.attention.num_kv_heads} key/value heads",
        )
    if plan.recompute is Recompute.SELECTIVE and "alternate_matmuls" in plan.recompute_modules:
        yield Unsupported(key="parallel.recompute", reason="alternate_matmuls is torchtitan's")
