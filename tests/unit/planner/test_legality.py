from dataclasses import fields, replace
from math import prod
from random import Random

import numpy as np
import pytest
from tests.every_member import check_every
from tests.plan_requests import plan_request

from meshwright.catalog.lookup import engine_names
from meshwright.cost.pipeline.schedules import PipelineShape, schedule_shortfall
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.engines.native.check import check_plan
from meshwright.planner.engines import LegalityContext, Scope, Severity, engine_facts
from meshwright.planner.legality import broken_rules, legal_mask, legality_context, violations
from meshwright.planner.request import request_for
from meshwright.planner.rules import rules_of
from meshwright.planner.search import search
from meshwright.planner.space import PlanChoices, default_space, enumerate_plans, num_rows
from meshwright.runfile import from_options
from meshwright.specs.features import CudaGraphs, Features
from meshwright.specs.plan import SCHEDULES, AxisOrder, Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import KernelChoices


def context(
    model="llama3-8b", cluster="h100-8x8", engine="native", seq_len=8192, batch=512, keys=(), **stored
) -> LegalityContext:
    run = from_options(
        model=model, cluster=cluster, global_batch=batch, sequence_length=seq_len, engine=engine, overrides=keys
    )
    request = request_for(run)
    kernels = replace(request.kernels, stored_activations=stored)
    return legality_context(replace(request, kernels=kernels))


@pytest.mark.parametrize("engine", engine_names())
def test_rules_of_choices_alone_ask_no_shape(engine):
    """The search asks them once for each choice, with any shape."""
    request = plan_request("deepseek-v2-lite", "h100-8x1", engine=engine)
    stack = replace(request.stack, features=Features(cuda_graphs=CudaGraphs.PARTIAL))
    plan = enumerate_plans(default_space(request))
    plan = plan.take(np.arange(0, num_rows(plan), 17))
    other = np.random.default_rng(0).permutation(num_rows(plan))
    of_choice = {f.name: getattr(plan, f.name) for f in fields(PlanChoices)} | {"micro_batch": plan.micro_batch[other]}
    setting = legality_context(replace(request, stack=stack))
    found = [rule for rule in rules_of(setting.facts) if rule.scope is Scope.CHOICE_ONLY]
    assert found
    for rule in found:
        holds = [rule.holds(setting, table) for table in (plan, replace(plan.take(other), **of_choice))]
        assert np.array_equal(*(np.broadcast_to(each, num_rows(plan)) for each in holds)), rule.name


def test_the_search_tries_no_choice_that_is_legal_with_no_shape():
    """Megatron has no replicas of shards: on many devices most choices have some."""
    result = search(plan_request("llama3.1-8b", "h100-8x64", engine="megatron"), top=1)
    assert len(result.space.data_replicate) > 2
    assert result.counts.expanded < 2 * result.counts.legal


def rules(plan: Plan, **where) -> set[str]:
    return {v.rule for v in violations(plan, context=context(**where))}


@pytest.mark.parametrize(
    "model",
    [
        "llama3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "deepseek-v2-lite",
        "qwen3-0.6b",
        "olmo2-7b",
        "gpt-oss-20b",
        "gemma2-9b",
    ],
)
def test_what_is_legal_for_native_its_engine_runs(model):
    run = from_options(model=model, cluster="h100-8x4", global_batch=256, sequence_length=4096)
    where, draw = legality_context(request_for(run)), Random(0).choice
    plans = []
    for _ in range(2500):  # one in a hundred is legal for OLMo 2: no experts, tensor 1
        degrees = {
            "tensor": draw((1, 2, 4, 8)),
            "context": draw((1, 1, 2, 4)),
            "pipeline": draw((1, 1, 2, 4)),
            "data_replicate": draw((1, 1, 2)),
        }
        plans += [
            Plan(
                **degrees,
                data_shard=max(1, 32 // prod(degrees.values())),
                virtual_pipeline=draw((1, 1, 2)),
                expert=draw((1, 2, 4, 8, 16)),
                expert_tensor=draw((1, 1, 2, 4)),
                sequence_parallel=draw((True, True, False)),
                sharding=draw(tuple(Sharding)),
                schedule=draw(tuple(Schedule)),
            )
        ]
    legal = np.flatnonzero(legal_mask(PlanTable.stack([plan_row(plan) for plan in plans]), context=where))
    assert len(legal) > 10
    for i in legal:
        assert check_plan(plans[i], run=run) == [], plans[i].describe()


@pytest.mark.when_touched  # test_what_is_legal_for_native_its_engine_runs draws plans
@pytest.mark.parametrize("name", ["llama3.1-70b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_what_the_search_tries_for_native_its_engine_runs(name):
    run = from_options(model=name, cluster="h100-8x2", global_batch=64, sequence_length=4096)
    request = request_for(run)
    space = default_space(request)
    # Every word of every axis, a few degrees of each: the whole space has millions of rows.
    few = {axis: getattr(space, axis)[:3] for axis in ("tensor", "context", "pipeline", "expert", "micro_batch")}
    table = enumerate_plans(replace(space, **few, virtual_pipeline=(1, 2, 3), data_replicate=(1, 2)))
    legal = table.take(np.flatnonzero(legal_mask(table, context=legality_context(request))))
    assert set(np.unique(legal.schedule)) == {SCHEDULES.index(s) for s in space.schedule}
    assert len(np.unique(legal.recompute_mask)) == len({choice.mask for choice in space.recompute})
    for row in Random(0).sample(range(num_rows(legal)), 1000):
        plan = plan_from_row(legal.take(row), splits=space.splits)
        assert check_plan(plan, run=run) == [], plan.describe()


def test_a_usual_plan_breaks_no_rule():
    plan = Plan(tensor=4, pipeline=2, data_shard=8)
    for engine in ("native", "megatron"):
        assert violations(plan, context=context(engine=engine)) == []


LORA, COMPILED = ("task=lora",), ("train.compile=true",)
CASES = [
    ("devices", Plan(tensor=4, data_shard=8), {}),
    ("heads", Plan(tensor=64, data_shard=1), {}),
    ("kv heads", Plan(tensor=16, data_shard=4), {}),
    ("feed-forward", Plan(tensor=3, data_shard=21), {"cluster": "h100-7x9"}),
    ("vocabulary", Plan(tensor=4, data_shard=16), {"model": "gpt3-175b", "engine": "maxtext"}),
    ("experts", Plan(expert=2, data_shard=64), {}),
    ("experts", Plan(expert=16, data_shard=64), {"model": "mixtral-8x7b"}),
    ("expert feed-forward", Plan(expert_tensor=7, tensor=7, data_shard=7),
     {"model": "gpt-oss-20b", "cluster": "h100-7x7"}),
    ("expert folding", Plan(expert=8, pipeline=16, data_shard=4), {"model": "mixtral-8x7b"}),
    ("expert tensor width", Plan(expert_tensor=2, tensor=2, data_shard=32),
     {"model": "mixtral-8x7b", "engine": "torchtitan"}),
    ("expert tensor width", Plan(expert_tensor=2, tensor=4, data_shard=16), {"model": "mixtral-8x7b"}),
    ("expert axis", Plan(expert=8, context=2, data_shard=4, pipeline=8),
     {"model": "mixtral-8x7b", "engine": "maxtext"}),
    ("layers", Plan(pipeline=64, data_shard=1), {}),
    ("layers", Plan(pipeline=16, data_shard=4), {"model": "llama3.1-405b", "engine": "maxtext"}),
    ("virtual stages", Plan(virtual_pipeline=2, data_shard=64), {}),
    ("virtual stages", Plan(pipeline=4, schedule=Schedule.INTERLEAVED, data_shard=16), {}),
    ("virtual stages", Plan(pipeline=4, virtual_pipeline=4, schedule=Schedule.ZBV, data_shard=16), {}),
    ("schedule", Plan(pipeline=4, schedule=Schedule.ZERO_BUBBLE, data_shard=16), {"engine": "megatron"}),
    ("schedule", Plan(pipeline=4, schedule=Schedule.DUALPIPE, data_shard=16), {"engine": "torchtitan"}),
    ("axis order", Plan(pipeline=2, data_shard=32, axis_order=AxisOrder.DATA_OUTERMOST), {}),
    ("axis order", Plan(pipeline=2, data_shard=32, expert=8, axis_order=AxisOrder.DATA_OUTERMOST),
     {"model": "mixtral-8x7b", "engine": "megatron"}),
    ("sequence", Plan(context=8, data_shard=8), {"seq_len": 8200}),
    ("sequence", Plan(context=8, data_shard=8), {"seq_len": 8208, "engine": "torchtitan"}),
    ("sequence parallelism", Plan(tensor=2, sequence_parallel=False, data_shard=32),
     {"model": "mixtral-8x7b", "engine": "megatron"}),
    ("scale-up domain", Plan(tensor=16, data_shard=4), {"model": "llama2-7b"}),
    ("global batch", Plan(data_shard=64, micro_batch=3), {}),
    ("micro-batches", Plan(pipeline=8, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, data_shard=8),
     {"batch": 32, "engine": "megatron"}),
    ("micro-batches", Plan(pipeline=8, schedule=Schedule.DUALPIPE, data_shard=8), {"batch": 64}),
    ("micro-batches", Plan(pipeline=8, virtual_pipeline=2, schedule=Schedule.ZBV, data_shard=8), {"batch": 112}),
    ("micro-batch rounds", Plan(pipeline=8, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, data_shard=8),
     {"batch": 8 * 17, "engine": "torchtitan"}),
    ("micro-batch rounds", Plan(pipeline=8, schedule=Schedule.GPIPE, data_shard=8),
     {"batch": 8 * 12, "engine": "maxtext"}),
    ("sharding", Plan(data_shard=64, sharding=Sharding.GRADIENTS), {"engine": "megatron"}),
    ("sharding", Plan(data_shard=64, sharding=Sharding.OPTIMIZER), {"engine": "torchtitan"}),
    ("replicas", Plan(data_shard=8, data_replicate=8, sharding=Sharding.OPTIMIZER), {}),
    ("fully sharded width", Plan(data_shard=63, sharding=Sharding.PARAMETERS),
     {"cluster": "h100-7x9", "engine": "maxtext", "batch": 63}),
    ("recomputation", Plan(data_shard=64), {"engine": "maxtext"}),
    ("recomputed modules", Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("mlp",)),
     {"engine": "torchtitan"}),
    ("recomputation under delayed scales",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)),
     {"engine": "megatron", "keys": ("precision=fp8_delayed",)}),
    ("recomputation in CUDA graphs", Plan(data_shard=64, recompute=Recompute.FULL),
     {"engine": "megatron", "keys": ("stack.cuda_graphs=partial",)}),
    ("recomputed experts in CUDA graphs",
     Plan(data_shard=64, expert=8, recompute=Recompute.SELECTIVE, recompute_modules=("moe",)),
     {"model": "mixtral-8x7b", "engine": "megatron", "keys": ("stack.cuda_graphs=partial",)}),
    ("recomputation under overlapped experts", Plan(data_shard=64, expert=8, recompute=Recompute.FULL),
     {"model": "mixtral-8x7b", "engine": "megatron", "keys": ("stack.overlaps_experts=true",)}),
    ("overlapped experts of virtual stages", Plan(pipeline=2, data_shard=32, expert=8),
     {"model": "mixtral-8x7b", "engine": "megatron", "keys": ("stack.overlaps_experts=true",)}),
    ("overlapped experts of tensor ranks", Plan(tensor=2, expert_tensor=2, data_shard=32),
     {"model": "mixtral-8x7b", "engine": "megatron", "keys": ("stack.overlaps_experts=true",)}),
    ("overlapped experts of a model", Plan(data_shard=64, expert=8),
     {"model": "mixtral-8x7b", "engine": "megatron", "keys": ("stack.overlaps_experts=true", "precision=fp32")}),
    ("overlapped experts of a model", Plan(data_shard=64, expert=8),  # it predicts a token without a pipeline
     {"model": "deepseek-v3", "engine": "megatron", "keys": ("stack.overlaps_experts=true",)}),
    ("overlapped experts in CUDA graphs", Plan(data_shard=64, expert=8),
     {"model": "mixtral-8x7b", "engine": "megatron",
      "keys": ("stack.overlaps_experts=true", "stack.cuda_graphs=full")}),
    ("recomputed modules exist",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("moe",)), {}),
    ("recomputed layers", Plan(pipeline=8, data_shard=8, recompute=Recompute.FULL, recompute_layers=4), {}),
    ("recomputation under zero bubble",
     Plan(pipeline=4, virtual_pipeline=2, schedule=Schedule.ZBV, data_shard=16, recompute=Recompute.FULL),
     {"engine": "torchtitan"}),
    ("recomputation under zero bubble",
     Plan(pipeline=4, schedule=Schedule.ZERO_BUBBLE, data_shard=16, recompute=Recompute.FULL), {}),
    ("recomputation under zero bubble",
     Plan(pipeline=4, schedule=Schedule.ZERO_BUBBLE, data_shard=16, recompute=Recompute.SELECTIVE,
          recompute_modules=("norm", "mlp")), {}),
    ("recomputed norms",
     Plan(tensor=2, data_shard=32, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)), {}),
    ("context of prediction modules", Plan(context=2, data_shard=32), {"model": "deepseek-v3"}),
    ("recomputed layers of stages",
     Plan(pipeline=4, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, data_shard=16, recompute=Recompute.FULL,
          recompute_layers=3), {"engine": "megatron"}),
    ("latent stages", Plan(pipeline=2, schedule=Schedule.GPIPE, data_shard=32),
     {"model": "deepseek-v2-lite", "engine": "maxtext"}),
    ("stages of windows", Plan(pipeline=2, schedule=Schedule.GPIPE, data_shard=32),
     {"model": "gpt-oss-20b", "engine": "maxtext"}),
    ("latent recomputation",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm", "activation")),
     {"model": "deepseek-v2-lite", "engine": "maxtext"}),
    ("norms over all heads", Plan(tensor=2, data_shard=32), {"model": "olmo2-7b"}),
    ("norms of outputs",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)), {"model": "olmo2-7b"}),
    ("biased experts", Plan(tensor=2, expert_tensor=2, data_shard=32), {"model": "gpt-oss-20b"}),
    ("state-space heads", Plan(tensor=16, data_shard=4), {"model": "nemotron-h-8b", "engine": "any"}),
    ("state-space context", Plan(context=3, data_shard=21), {"model": "nemotron-h-8b", "engine": "any"}),
    ("output groups", Plan(tensor=16, data_shard=4), {"model": "deepseek-v4-flash", "engine": "any"}),
    ("linear attention heads", Plan(tensor=32, data_shard=2), {"model": "qwen3.5-9b", "engine": "any"}),
    ("linear attention context", Plan(context=32, data_shard=2), {"model": "qwen3.5-9b", "engine": "any"}),
    ("linear attention context", Plan(context=2, data_shard=32), {"model": "kimi-linear-48b-a3b", "engine": "any"}),
    ("stored activations", Plan(data_shard=64, recompute=Recompute.FULL), {"feed_forward": "int8"}),
    ("stored activations",
     Plan(data_shard=64, recompute=Recompute.FULL, stored_activations=("feed_forward",)), {}),
    ("stored activations of norm",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm",),
          stored_activations=("feed_forward", "norm")), {}),
    ("stored activations of feed_forward",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("mlp",),
          stored_activations=("feed_forward", "norm")), {}),
    ("modules with stored activations", Plan(data_shard=64, stored_activations=("norm",)), {"engine": "megatron"}),
    ("weight cache", Plan(data_shard=64, weight_cache="off"), {}),  # in 16 bits
    ("weight cache", Plan(data_shard=64, weight_cache="on"), {"engine": "torchtitan"}),
    ("chunks of the loss", Plan(data_shard=64, loss_chunk=512), {"engine": "megatron"}),
    ("alternate GEMMs",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm", "alternate_matmuls")), {}),
    ("alternate GEMMs", Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("alternate_matmuls",)),
     {"engine": "megatron"}),
    ("recomputed modules exist",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("mlp",)), {"model": "mixtral-8x7b"}),
    ("recomputed layers of stages",  # the last stage has fewer than 4 layers
     Plan(pipeline=4, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, data_shard=16, recompute=Recompute.FULL,
          recompute_layers=8, layers_per_stage=(4, 5, 5, 5, 5, 5, 2, 1)), {"engine": "megatron"}),
    ("offloaded activations in a pipeline", Plan(pipeline=2, data_shard=32),
     {"engine": "megatron", "keys": ("stack.offloaded_activations=0.5",)}),
    ("offloaded activations", Plan(pipeline=2, data_shard=32, schedule=Schedule.GPIPE, recompute=Recompute.FULL),
     {"engine": "maxtext", "keys": ("stack.offloaded_activations=1",)}),
    ("offloaded activations under recomputation", Plan(data_shard=64, recompute=Recompute.FULL),
     {"engine": "megatron", "keys": ("stack.offloaded_activations=0.5",)}),
    ("equal chunks of the loss", Plan(data_shard=64, sharding=Sharding.PARAMETERS),
     {"engine": "torchtitan", "keys": ("kernels.loss_chunk=1000",)}),
    ("equal chunks of the loss", Plan(data_shard=64, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL),
     {"engine": "maxtext", "keys": ("kernels.loss_chunk=1000",)}),
    ("equal chunks of the loss",
     Plan(data_shard=64, sharding=Sharding.PARAMETERS, loss_chunk=512, recompute=Recompute.FULL),
     {"engine": "maxtext", "keys": LORA}),
    ("equal chunks of the loss", Plan(data_shard=64, sharding=Sharding.PARAMETERS, loss_chunk=768),
     {"engine": "torchtitan"}),
    ("filled stages", Plan(pipeline=2, data_shard=32, layers_per_stage=(0, 32)), {"engine": "torchtitan"}),
    ("filled stages",  # 7 x 6 layers are more than 40: nothing is left for the last stage
     Plan(pipeline=3, virtual_pipeline=4, schedule=Schedule.INTERLEAVED, data_shard=21),
     {"model": "qwen3-14b", "cluster": "h100-7x9", "engine": "torchtitan"}),
    ("filled stages of adapters", Plan(pipeline=2, data_shard=32, layers_per_stage=(32, 0)), {"keys": LORA}),
    ("adapters of chosen layers", Plan(pipeline=2, data_shard=32), {"keys": (*LORA, "lora.layers=[0]")}),
    ("tied embeddings", Plan(pipeline=2, data_shard=32), {"model": "llama3.2-1b", "engine": "torchtitan"}),
    ("sharding over context ranks", Plan(context=2, data_shard=32, sharding=Sharding.NONE), {"engine": "torchtitan"}),
    ("sequences of experts", Plan(tensor=2, data_shard=32), {"model": "gpt-oss-20b", "engine": "torchtitan"}),
    ("sequences of experts", Plan(tensor=2, data_shard=32, micro_batch=2),
     {"model": "mixtral-8x7b", "engine": "maxtext"}),
    ("stages of adapters", Plan(pipeline=2, data_shard=32), {"engine": "maxtext", "keys": LORA}),
    ("axes that shard weights", Plan(context=4, data_shard=16), {"engine": "maxtext"}),
    ("shards of one rank",
     Plan(tensor=8, pipeline=8, sharding=Sharding.PARAMETERS, schedule=Schedule.GPIPE), {"engine": "maxtext"}),
    ("fully sharded experts",
     Plan(expert=32, data_shard=16, data_replicate=4, sharding=Sharding.PARAMETERS),
     {"model": "gpt-oss-20b", "engine": "maxtext"}),
    ("accumulated gradients", Plan(data_shard=64), {"engine": "maxtext", "keys": ("precision=fp32",)}),
    ("devices of JAX", Plan(data_shard=64), {"engine": "maxtext", "cluster": "tpu7x-4x16"}),
    ("experts of tensor ranks", Plan(tensor=2, data_shard=32), {"model": "mixtral-8x7b", "engine": "megatron"}),
    ("narrow states", Plan(data_shard=64, sharding=Sharding.NONE),
     {"engine": "megatron", "keys": ("optimizer.states=bf16",)}),
    ("quantised base of tensor ranks", Plan(tensor=2, data_shard=32),
     {"keys": (*LORA, "lora.base_format=nf4")}),
    ("quantised base of shards", Plan(context=2, data_shard=32, sharding=Sharding.PARAMETERS),
     {"keys": (*LORA, "lora.base_format=int8")}),
    ("dropout of latents", Plan(tensor=2, data_shard=32),
     {"model": "deepseek-v2-lite", "keys": (*LORA, "lora.dropout=0.1", "lora.targets=[query, output]")}),
    ("recomputed dropout",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("mla_up_projection",)),
     {"model": "deepseek-v2-lite", "keys": (*LORA, "lora.dropout=0.1", "lora.targets=[query, output]")}),
    ("dropout of attention", Plan(tensor=2, data_shard=32), {"keys": ("train.attention_dropout=0.1",)}),
    ("steps of labels", Plan(pipeline=2, data_shard=32), {"keys": ("batch.label_tokens=1000000",)}),
    ("pairs of answers", Plan(pipeline=2, data_shard=32), {"keys": ("train.preference=dpo",)}),
    ("pairs of answers", Plan(context=2, data_shard=32), {"keys": ("train.preference=dpo",)}),
    ("completions", Plan(pipeline=2, data_shard=32), {"keys": ("train.grpo.rewards=[exact]",)}),
    ("compiled backward pass", Plan(pipeline=2, data_shard=32, schedule=Schedule.ZERO_BUBBLE), {"keys": COMPILED}),
    ("compiled recomputation",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)), {"keys": COMPILED}),
    ("compiled storage", Plan(data_shard=64), {"keys": COMPILED, "norm": "int8"}),
    ("narrow widths", Plan(tensor=8, data_shard=8),
     {"model": "glm-4.5-air", "cluster": "b200-8x8", "keys": ("precision=mxfp8",)}),
    ("narrow widths", Plan(data_shard=64), {"seq_len": 3000, "keys": ("precision=fp8",)}),
    ("cached weights", Plan(data_shard=64, sharding=Sharding.PARAMETERS),
     {"keys": ("precision=fp8", "kernels.weight_cache='on'")}),
    ("cached weights", Plan(data_shard=64), {"keys": ("kernels.weight_cache='on'",)}),
    ("offloaded activations", Plan(pipeline=2, data_shard=32), {"keys": ("stack.offloaded_activations=1",)}),
    ("offloaded and recomputed activations",
     Plan(data_shard=64, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)),
     {"keys": ("stack.offloaded_activations=1",)}),
    ("compiled offloading", Plan(data_shard=64), {"keys": (*COMPILED, "stack.offloaded_activations=1")}),
    ("states in host memory", Plan(data_shard=64, offload=Offload.OPTIMIZER), {"engine": "maxtext"}),
    ("offloaded states without a distributed optimizer",
     Plan(data_shard=64, sharding=Sharding.NONE, offload=Offload.OPTIMIZER), {"engine": "megatron"}),
    ("offloaded states in 16 bits", Plan(data_shard=64, offload=Offload.OPTIMIZER),
     {"engine": "megatron", "keys": ("optimizer.states=bf16",)}),
    ("offloaded states and gathers in 8 bits", Plan(data_shard=64, offload=Offload.OPTIMIZER),
     {"engine": "megatron", "keys": ("precision=fp8", "stack.parameter_format=fp8")}),
    ("offloaded states", Plan(data_shard=64, offload=Offload.OPTIMIZER), {"keys": ("optimizer={name: lion}",)}),
    ("blocks of sharded states", Plan(data_shard=64), {"keys": ("optimizer={name: adamw8bit}",)}),
    ("blocks of split matrices", Plan(tensor=2, data_shard=32), {"keys": ("optimizer={name: adamw8bit}",)}),
    ("data parallelism alone", Plan(tensor=2, data_shard=32, sharding=Sharding.NONE), {"engine": "trl"}),
    ("one group of shards", Plan(data_replicate=8, data_shard=8), {"engine": "trl"}),
    ("reduction of shards", Plan(data_shard=64, sharding=Sharding.PARAMETERS),
     {"engine": "trl", "keys": ("stack.gradient_format=fp32",)}),
    ("quantised base of shards", Plan(data_shard=64),
     {"engine": "trl", "keys": ("task=lora", "lora.base_format=nf4")}),
]  # fmt: skip


def test_rule_is_broken():
    def check(rule, plan, where):
        assert rule in rules(plan, **where)

    check_every(CASES, lambda case: check(*case))


def test_every_rule_has_a_case():
    facts = [engine_facts(name) for name in engine_names()]
    assert {rule.name for each in facts for rule in rules_of(each)} == {rule for rule, _, _ in CASES}


def test_messages_hold_the_numbers():
    (found,) = [v for v in violations(Plan(tensor=16, data_shard=4), context=context()) if v.rule == "kv heads"]
    assert str(found) == "tensor 16 does not divide 8 key/value heads"


def test_a_discouraged_plan_is_legal_and_flagged():
    where = context("llama2-7b")
    plan = Plan(tensor=16, data_shard=4)
    assert [v.severity for v in violations(plan, context=where)] == [Severity.DISCOURAGED]
    assert legal_mask(PlanTable.stack([plan_row(plan)]), context=where).all()


def test_only_where_an_engine_can_tensor_ranks_repeat_key_value_heads():
    assert "kv heads" not in rules(Plan(tensor=16, data_shard=4), engine="any")
    assert "kv heads" in rules(Plan(tensor=16, data_shard=4), engine="megatron")


@pytest.mark.when_touched  # test_rule_is_broken breaks each rule
@pytest.mark.parametrize("engine", engine_names())
def test_mask_and_sentences_agree(engine):
    request = plan_request("gpt-oss-20b", "h100-8x2", engine=engine, seq_len=4096, global_batch=48)
    where = legality_context(request)
    space = default_space(request)
    plan = enumerate_plans(space)
    rows = plan.take(np.random.default_rng(7).integers(0, num_rows(plan), 300))
    mask, count = legal_mask(rows, context=where), broken_rules(rows, context=where)
    for i in range(300):
        found = violations(plan_from_row(rows.take(i), splits=space.splits), context=where)
        refused = [v for v in found if v.severity is Severity.REFUSED]
        assert (len(refused) == 0) == mask[i]
        assert len(refused) == count[i]


class TestLayersPerStage:
    """Any split that holds all layers is costed; engines that split evenly refuse others."""

    def split(self, *layers: int, virtual: int = 1, engine: str = "native") -> list:
        pipeline = len(layers) // virtual
        schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
        plan = Plan(
            pipeline=pipeline, virtual_pipeline=virtual, schedule=schedule, data_shard=64 // pipeline,
            layers_per_stage=layers,
        )  # fmt: skip
        return violations(plan, context=context(engine=engine))  # 32 layers

    @pytest.mark.parametrize("layers", [(8, 8, 8, 8), (7, 9, 9, 7), (10, 6, 8, 8), (15, 17), (0, 32)])
    def test_any_split_of_all_layers_is_accepted(self, layers):
        assert self.split(*layers) == []

    def test_virtual_stages_too(self):
        assert self.split(4, 4, 4, 4, 4, 4, 4, 4, virtual=2) == []
        assert self.split(3, 4, 4, 5, 4, 4, 5, 3, virtual=2) == []

    @pytest.mark.parametrize(
        ("layers", "message"), [((7, 9, 9, 9), "adds up to 34, the model has 32"), ((33, -1), "the model has 32")]
    )
    def test_layers_that_do_not_add_up_are_refused(self, layers, message):
        (violation,) = self.split(*layers)
        assert violation.severity is Severity.REFUSED
        assert message in violation.message

    def test_a_number_for_each_stage(self):
        plan = Plan(pipeline=4, data_shard=16, layers_per_stage=(16, 16))
        (violation,) = violations(plan, context=context())
        assert "has 2 stages, pipeline x virtual_pipeline are 4" in violation.message

    def test_an_engine_that_splits_evenly_refuses(self):
        assert "splits layers evenly" in " ".join(map(str, self.split(7, 9, 9, 7, engine="maxtext")))


def test_replicas_that_do_not_divide_the_data_width_are_named():
    plan = Plan(tensor=4, pipeline=2, data_shard=0, data_replicate=3)
    (violation,) = [v for v in violations(plan, context=context()) if v.rule == "devices"]
    assert violation.message == (
        "data_replicate 3 does not divide the data width 8, which context 1 x tensor 4 x pipeline 2 leave of 64 devices"
    )


def test_what_is_legal_can_be_simulated():
    """No plan of a whole space is legal whose schedule the event graph refuses."""
    run = from_options(model="llama3-8b", cluster="h100-8x2", global_batch=32, sequence_length=2048, engine="native")
    request = request_for(run)
    plans = enumerate_plans(default_space(request))
    legal = plans.take(np.flatnonzero(legal_mask(plans, context=legality_context(request))))
    shapes = {
        (int(s), int(p), int(v), int(32 // (b * d)))
        for s, p, v, b, d in zip(
            legal.schedule, legal.pipeline, legal.virtual_pipeline, legal.micro_batch, legal.data, strict=True
        )
        if p > 1
    }
    assert len(shapes) > 20
    for schedule, p, v, m in shapes:
        shape = PipelineShape(schedule=SCHEDULES[schedule], num_ranks=p, num_chunks=v, num_micro_batches=m)
        assert schedule_shortfall(shape) is None, shape


def test_what_is_stored_in_8_bits_is_not_recomputed():
    run = from_options(model="llama3-8b", cluster="h100-8x1", global_batch=8, sequence_length=4096)
    request = request_for(run)
    stored = replace(request, kernels=KernelChoices(stored_activations={"feed_forward": "int8"}))
    plans = [
        Plan(data_shard=8),
        Plan(data_shard=8, recompute=Recompute.SELECTIVE, recompute_modules=("norm",)),
        Plan(data_shard=8, recompute=Recompute.SELECTIVE, recompute_modules=("activation",)),
        Plan(data_shard=8, recompute=Recompute.FULL),
    ]
    table = PlanTable.stack([plan_row(plan) for plan in plans])
    assert legal_mask(table, context=legality_context(request)).all()
    assert legal_mask(table, context=legality_context(stored)).tolist() == [True, True, False, False]
