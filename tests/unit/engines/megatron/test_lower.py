"""Arguments of Megatron's constructors, as they were decided for some runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_lm.arguments import known_names

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 2}
cluster: h100-8x2
engine: megatron
parallel: {tensor: 2, pipeline: 2, expert: 4, data_shard: 4, sharding: optimizer,
  recompute: {modules: [core_attention, moe]}}
train: {steps: 10}
"""

SHARED = """model={hidden: 64, num_layers: 3, vocab: 258, ffn_hidden: 128,
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 32,
num_dense_layers: 1, num_shared: 1, router: sigmoid, routed_scale: 2.5}}"""


def settings(*overrides: str) -> dict[str, dict]:
    launch = contract.lower(runfile.loads(BASE, overrides=overrides), folder=Path("out"))
    assert launch.num_processes == 16
    assert launch.argv == ("python", "-m", "meshwright.engines.megatron.worker", "out/meshwright_run.yaml")
    assert runfile.loads(launch.files["meshwright_run.yaml"]).plan is not None
    return json.loads(launch.files["megatron.json"])


def test_a_mixture_under_every_axis():
    found = settings()
    grid = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }  # fmt: skip
    assert found["parallel"] == grid
    assert found["transformer"] == grid | {
        "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 768, "num_attention_heads": 32,
        "num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True, "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-06, "gated_linear_unit": True, "activation_func": "silu",
        "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_moe_experts": 128,
        "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_layer_freq": 1,
        "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None, "moe_router_enable_expert_bias": False, "bf16": True,
        "params_dtype": "bf16", "pipeline_dtype": "bf16", "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True, "apply_rope_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "sequence_parallel": True,
        "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 24], [*["decoder"] * 24, "loss"]],
        "recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"],
    }  # fmt: skip
    assert found["gpt"] == {
        "vocab_size": 151936, "max_sequence_length": 4096, "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope", "rotary_base": 1000000.0,
    }  # fmt: skip
    assert found["ddp"] == {
        "use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }  # fmt: skip
    assert found["optimizer"]["use_distributed_optimizer"] is True


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.checkpoint={folder: c}", "optimizer.schedule=wsd", "data.source=a/b.bin"],
        ["model=llama3.1-8b", "parallel={data_shard: 8, tensor: 2, sharding: none, recompute: {layers: 3}}"],
        ["model=qwen3-0.6b", "parallel={data_shard: 16, sharding: optimizer}", "train.evaluate={}",
         "data.validation=v.txt", "data.source=t.txt", "optimizer.gradient_clip=null"],
        [SHARED, "parallel={data_shard: 16, expert: 8, sharding: optimizer}"],
    ],
)  # fmt: skip
def test_every_argument_of_megatron_lm_is_one_of_its_parsers(overrides):
    run = runfile.loads(BASE, overrides=overrides)
    lines = contract.lower(run, folder=Path("out")).files["megatron_lm.args"].splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines}
    assert len(found) == len(lines)
    for name, values in found.items():
        takes = known_names()[name.removeprefix("--")]
        assert {"nothing": not values, "one": len(values) == 1, "several": bool(values)}[takes], name
    assert found["--num-layers"] == [str(run.model.num_layers)]
    assert found["--micro-batch-size"] == ["2"]
    if run.model.experts is not None:
        assert found["--num-experts"] == [str(run.model.experts.num_experts)]


def test_arguments_of_a_mixture():
    lines = contract.lower(runfile.loads(BASE), folder=Path("out")).files["megatron_lm.args"].splitlines()
    assert f"--pipeline-model-parallel-layout E{'t' * 24}|{'t' * 24}L" in lines
    for line in ("--recompute-modules core_attn moe", "--rotary-base 1000000", "--swiglu", "--mock-data",
                 "--norm-epsilon 1e-06", "--use-distributed-optimizer", "--expert-model-parallel-size 4",
                 "--sequence-parallel", "--lr-decay-style cosine"):  # fmt: skip
        assert line in lines, line


def test_stages_in_turn_and_a_vocabulary_that_does_not_divide():
    found = settings(
        "model={hidden: 64, num_layers: 34, vocab: 257, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}, "
        "rope: {scaling: llama3, factor: 8, original_context: 8192}}", "optimizer.gradient_clip=null", "precision=fp32",
        "parallel={tensor: 2, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, data_shard: 4, "
        "sharding: none, recompute: {layers: 6}}",
    )  # fmt: skip
    stages = found["transformer"]["pipeline_model_parallel_layout"]
    assert [stage.count("decoder") for stage in stages] == [8, 9, 9, 8]
    assert found["transformer"]["overlap_p2p_comm"] is True
    assert found["transformer"]["recompute_method"] == "block"
    assert found["transformer"]["recompute_num_layers"] == 3
    assert found["transformer"]["params_dtype"] == "fp32"
    assert found["gpt"]["vocab_size"] == 258
    assert found["gpt"]["rope_scaling_factor"] == 8.0
    assert found["optimizer"]["clip_grad"] is None
