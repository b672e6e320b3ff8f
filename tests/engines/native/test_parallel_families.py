"""Caps, sinks, norms of outputs, partial rotation and biased experts: any plan gives what one process gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.native.check import check, check_plan
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import Task

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

LONGER = ("data.sequence_length=32", "batch.global_sequences=4", "model.num_layers=2")
GEMMA = (
    "model.attention={num_heads: 4, num_kv_heads: 2, head_dim: 16, window: 7, window_pattern: [true, false], "
    "score_divisor: 24, score_cap: 0.05}",
    "model.logit_cap=0.5", "model.activation=gelu_tanh", "model.norm_placement=both", "model.zero_centered_norms=true",
    "model.scaled_embeddings=true", "model.tied_embeddings=true", "model.windowed_rope={theta: 100}",
)  # fmt: skip
"""Gemma 2 with the two RoPEs of Gemma 3, and caps that these small scores reach."""
OLMO = ("model.norm_placement=after",)
PHI = (
    "model.rope={theta: 100, scaling: longrope, factor: 2, original_context: 16, rotated_share: 0.75, "
    "short_factors: [1, 1.1, 1.3], long_factors: [1, 1.5, 3]}",
    "model.attention.window=9", "model.attention.num_windowed_layers=2",
)  # fmt: skip
GPT_OSS = (
    "model.attention={num_heads: 4, num_kv_heads: 2, head_dim: 16, bias: true, window: 7, "
    "window_pattern: [true, false], sinks: true}",
    "model.ffn_hidden=0", "model.activation=clamped_swiglu",
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true}", "train.balance_loss=0.1",
    "batch.global_sequences=8",
)  # fmt: skip
FULL = Sharding.PARAMETERS
TENSOR, CONTEXT = Plan(tensor=2, micro_batch=2), Plan(context=2, micro_batch=2)
STAGES, SHARDS = Plan(pipeline=2, micro_batch=2), Plan(data_shard=2, sharding=FULL, micro_batch=2)
EXPERTS = replace(SHARDS, expert=2)


def run_of(*overrides):
    return tiny_run(*LONGER, *overrides)


def with_adapters(run):
    return replace(run, task=Task.LORA, lora=Lora(rank=4))


@pytest.mark.when_touched  # packed documents are divided below, experts and shards in test_parallel_expert.py
@pytest.mark.distributed
def test_two_ranks_equal_one(equals_one_process):
    gemma, oss = run_of(*GEMMA), run_of(*GPT_OSS)
    equals_one_process(
        [
            *((gemma, plan) for plan in (TENSOR, CONTEXT, STAGES, SHARDS)),
            *((oss, plan) for plan in (TENSOR, CONTEXT, STAGES, EXPERTS)),
            (run_of(*OLMO), TENSOR),
            (gemma, replace(TENSOR, sequence_parallel=False)),
            (gemma, replace(SHARDS, recompute=Recompute.SELECTIVE, recompute_modules=("norm", "activation"))),
            (oss, replace(CONTEXT, recompute=Recompute.SELECTIVE, recompute_modules=("activation", "core_attention"))),
            (with_adapters(gemma), TENSOR),
            (with_adapters(oss), EXPERTS),
        ]
    )


@pytest.mark.distributed
@pytest.mark.when_touched  # test_parallel_context.py divides packed documents
def test_packed_documents_are_rotated_by_their_own_length_on_two_ranks(equals_one_process, tmp_path):
    path = tmp_path / "answers.jsonl"
    lengths = [3 + 7 * i % 23 for i in range(200)]  # on both sides of the original context of 16
    path.write_text("".join(json.dumps({"prompt": "ab", "completion": "c" * n}) + "\n" for n in lengths))
    phi = run_of(*PHI, f"data.source={path}", "data.tokenizer=bytes", "model.vocab=260")
    equals_one_process([(phi, CONTEXT), (phi, STAGES), (phi, TENSOR)])


@pytest.mark.distributed
@pytest.mark.slow  # packed documents of PHI are above, shards of GEMMA and experts of GPT_OSS before
def test_more_plans_on_two_ranks_equal_one(equals_one_process):
    phi, oss = run_of(*PHI), run_of(*GPT_OSS)
    equals_one_process([(oss, SHARDS), *((phi, plan) for plan in (TENSOR, CONTEXT, STAGES, SHARDS))])


@pytest.mark.distributed
@pytest.mark.slow
def test_four_ranks_equal_one(equals_one_process):
    gemma, oss = run_of(*GEMMA), run_of(*GPT_OSS)
    equals_one_process(
        [
            (gemma, replace(TENSOR, context=2)),
            (gemma, replace(TENSOR, pipeline=2, schedule=Schedule.ZERO_BUBBLE, micro_batch=1)),
            (gemma, replace(CONTEXT, data_shard=2, sharding=FULL, recompute=Recompute.FULL)),
            (oss, replace(TENSOR, data_shard=2, expert=2, sharding=FULL)),
            (oss, replace(EXPERTS, data_shard=4, expert=4)),
            (oss, replace(EXPERTS, pipeline=2, recompute=Recompute.FULL)),
        ]
    )


@pytest.mark.parametrize(
    ("overrides", "plan", "key", "reason"),
    [
        (
            ("model.attention.qk_norm=true", "model.attention.qk_norm_across_heads=true"),
            TENSOR,
            "parallel.tensor",
            "over all heads",
        ),
        (GPT_OSS, replace(SHARDS, expert_tensor=2), "parallel.expert_tensor", "biases of an expert's output"),
        (OLMO, Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm",)), "parallel.recompute", "has no norm"),
    ],
)
def test_what_an_axis_cannot_do_is_refused(overrides, plan, key, reason):
    (problem,) = check_plan(plan, run=run_of(*overrides))
    assert (problem.key, reason in problem.reason) == (key, True)


def test_adapters_need_all_parts_of_a_fused_matrix():
    run = with_adapters(run_of(*PHI, "model.family=Phi3ForCausalLM"))
    assert check(run) == ()
    (problem,) = check(replace(run, lora=Lora(targets=("query", "up", "gate"))))
    assert (problem.key, "need key, query, value" in problem.reason) == ("lora.targets", True)
