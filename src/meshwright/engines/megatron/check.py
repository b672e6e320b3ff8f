"""What Megatron-Core 0.16 cannot do of a run, with the reason. Pure: Megatron need not be installed.

The training here does without Transformer Engine. Megatron-LM and Megatron-Bridge have it: what can be written for them
(`check_export`) is more than what is trained here (`check`).

Plans are judged by the planner's rules of this engine, so that what is searched is what is accepted. What depends on
the machine is asked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.megatron.megatron_core.constructors import NARROW
from meshwright.specs.model import AttentionKind, Experts, Model, Rope, RopeScaling, Router
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.specs.run import Run, StateFormat, Task

PRECISIONS = ("fp32", "bf16")
YARN_CONTEXT = 4096  # what latent attention's YARN is stretched from: Megatron-LM has no option for it
LLAMA3_CONTEXT = 8192  # what Megatron's stretching of Llama 3.1 takes for granted, with 1 and 4


def check(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that cannot be trained here; empty when all of it can."""
    return _problems(run, is_here=True)


def check_export(run: Run) -> tuple[Unsupported, ...]:
    """Everything of `run` that cannot be said to Megatron-LM and Megatron-Bridge either."""
    return _problems(run, is_here=False)


def _problems(run: Run, *, is_here: bool) -> tuple[Unsupported, ...]:
    problems = [*_model(run.model, is_here=is_here), *_numbers(run, is_here=is_here), *_training(run)]
    if run.plan is not None:
        problems += check_plan(run.plan, run=run, is_here=is_here)
    return tuple(problems)


def _model(model: Model, *, is_here: bool) -> Iterator[Unsupported]:
    """Why GPTModel cannot be `model`."""
    a, is_latent = model.attention, model.attention.kind is AttentionKind.MLA
    for wrong, what in (
        (model.norm_bias, "LayerNorm"),
        (not model.gated_ffn, "feed-forward blocks without a gate"),
        (model.learned_positions > 0, "learned positions"),
        (a.bias, "biases"),
        (a.num_windowed_layers > 0, "sliding windows"),
        (is_here and model.num_mtp_layers > 0, "multi-token prediction modules"),
        (model.family == "GptOssForCausalLM", "attention sinks"),
        (is_here and is_latent, "latent attention, which needs Transformer Engine,"),
    ):
        if wrong:
            yield Unsupported(key="model", reason=f"{what} of {model.name} are not lowered")
    if a.kind is AttentionKind.GQA and a.v_dim != a.head_dim:
        yield Unsupported(key="model", reason=f"values of {model.name} are not as wide as its keys")
    yield from _latent_rope(model.rope) if is_latent and not is_here else _rope(model.rope)
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


def _latent_rope(rope: Rope) -> Iterator[Unsupported]:
    fixed = (rope.original_context, rope.beta_fast, rope.beta_slow, rope.truncate)
    if rope.scaling is RopeScaling.YARN and fixed != (YARN_CONTEXT, 32.0, 1.0, True):
        yield Unsupported(
            key="model", reason=f"Megatron-LM stretches from {YARN_CONTEXT} tokens, between 32 and 1 turns"
        )
    if rope.scaling not in (RopeScaling.NONE, RopeScaling.YARN):
        yield Unsupported(
            key="model", reason="rotary frequencies of latent attention are stretched by yarn or not at all"
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


def _numbers(run: Run, *, is_here: bool) -> Iterator[Unsupported]:
    if is_here:
        reason = "needs Transformer Engine, which is not used"
        yield from refusals.other_precisions(run, allowed=PRECISIONS, reason=reason)
    else:
        yield from refusals.other_precisions(run, allowed=(*PRECISIONS, *NARROW))
    if run.optimizer.states is not StateFormat.FP32 and is_here:
        yield Unsupported(
            key="optimizer.states", reason="narrow states need Transformer Engine: must be fp32"
        )
    yield from refusals.absent_experts(run)
    yield from _balance(run)
    yield from refusals.z_loss(run)
    yield from refusals.absent_routing_biases(run)


def _balance(run: Run) -> Iterator[Unsupported]:
    x = run.model.experts
    if run.train.balance_loss and x is not None and (x.router is Router.SIGMOID or x.num_groups):
        yield Unsupported(
            key="train.balance_loss",
            reason="Megatron counts the experts of the highest scores, not those that routing biases or groups choose: "
            "must be 0",
            hint="train.balance_bias_rate balances sigmoid routers" if x.router is Router.SIGMOID else None,
        )


def _training(run: Run) -> Iterator[Unsupported]:
    yield from refusals.endless(run)
    yield from refusals.keys_of_the_native_engine(run)
    yield from refusals.nothing_to_validate_on(run)
    if run.task is not Task.PRETRAIN:
        yield Unsupported(key="task", reason="Megatron-Core has no adapters: must be pretrain")
    if run.train.compile:
        yield Unsupported(key="train.compile", reason="is not lowered: must be false")
    if run.train.trackers:
        yield Unsupported(key="train.trackers", reason="the step log alone is written: leave it out")


def check_plan(plan: Plan, *, run: Run, is_here: bool = True) -> list[Unsupported]:
    """What Megatron-Core 0.16 cannot do of `plan`; `is_here`: without Transformer Engine."""
    return [
        *refusals.by_planner_rules(plan, run=run, engine="megatron", any_layers_per_stage=True),
        *refusals.offload(plan),
        *_plan_details(plan, run, is_here=is_here),
    ]


def _plan_details(plan: Plan, run: Run, *, is_here: bool) -> Iterator[Unsupported]:
    if plan.context > 1 and is_here:
        yield Unsupported(
            key="parallel.context",
            reason="needs attention of Transformer Engine, which is not used: must be 1",
        )
    if plan.sharding is Sharding.PARAMETERS:
        yield Unsupported(
            key="parallel.sharding", reason="sharded parameters are not lowered",
            hint="allowed: none, optimizer",
        )  # fmt: skip
    is_shared = plan.sharding is Sharding.OPTIMIZER
    if run.optimizer.states is not StateFormat.FP32 and not is_here and not is_shared:
        yield Unsupported(
            key="optimizer.states",
            reason="narrow states are those of a shared optimizer",
            hint="parallel.sharding: optimizer",
        )
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
