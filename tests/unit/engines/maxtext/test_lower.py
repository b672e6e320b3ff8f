"""A run as a configuration of MaxText: what stands where. MaxText is not needed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.maxtext import contract
from meshwright.engines.maxtext.check import SCHEDULES
from meshwright.engines.maxtext.in_maxtext_environment.meshwright_weights import leaf_array, leaf_tensors, names
from meshwright.engines.maxtext.lower import fraction_for, schedule_keys
from meshwright.specs.run import Optimizer

TOY = """
model: {name: toy, hidden: 64, num_layers: 8, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: notes.txt, tokenizer: bytes, sequence_length: 256}
batch: {global_sequences: 16, micro: 2}
optimizer: {learning_rate: 1.0e-3, schedule: wsd, warmup_steps: 2, gradient_clip: null}
cluster: here
engine: maxtext
parallel: {data_shard: 2, sharding: parameters, recompute: full}
train: {steps: 10, seed: 7, checkpoint: {folder: saved, every_steps: 5, keep: 3}}
"""
GOLDEN = """
base_config: base.yml
run_name: maxtext
decoder_block: qwen3
base_emb_dim: 64
base_num_decoder_layers: 8
base_num_query_heads: 4
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 128
vocab_size: 512
mlp_activations: [silu, linear]
normalization_layer_epsilon: 1.0e-05
use_qk_norm: false
logits_via_embedding: false
normalize_embedding_logits: false
rope_type: default
rope_max_timescale: 10000
enable_dropout: false
dtype: bfloat16
weight_dtype: float32
grad_dtype: float32
matmul_precision: default
attention: autoselected
sparse_matmul: true
megablox: false
num_slices: 1
ici_data_parallelism: 1
ici_fsdp_parallelism: 2
ici_expert_parallelism: 1
ici_tensor_parallelism: 1
ici_context_parallelism: 1
ici_pipeline_parallelism: 1
shard_optimizer_over_data: false
max_target_length: 256
per_device_batch_size: 2.0
gradient_accumulation_steps: 4
remat_policy: full
opt_type: adamw
learning_rate: 0.001
adam_b1: 0.9
adam_b2: 0.95
adam_eps: 1.0e-08
adam_weight_decay: 0.1
adamw_mask: [scale]
gradient_clipping_threshold: 0.0
steps: 11
learning_rate_schedule_steps: 11
lr_schedule_type: wsd
warmup_steps_fraction: 0.18181818181818182
learning_rate_final_fraction: 0.1
wsd_decay_style: linear
wsd_decay_steps_fraction: 0.18181818181818182
dataset_type: grain
grain_file_type: mmap_npy
grain_train_files: out/maxtext/data/index|out/maxtext/data/tokens
train_data_columns: [text]
tokenize_train_data: false
enable_data_shuffling: false
data_shuffle_seed: 7
packing: true
reset_attention_mask: true
eod_mask_loss: true
grain_worker_count: 0
init_weights_seed: 7
base_output_directory: saved
source_checkpoint_layout: safetensors
checkpoint_conversion_fn: meshwright_weights.convert
enable_checkpointing: true
async_checkpointing: true
checkpoint_period: 5
save_checkpoint_on_start: false
save_checkpoint_on_completion: true
max_num_checkpoints_to_keep: 3
eval_interval: -1
metrics_file: out/maxtext/metrics.jsonl
enable_tensorboard: false
enable_goodput_recording: false
monitor_goodput: false
log_config: false
"""


def lowered(*overrides: str) -> dict[str, str]:
    run = runfile.loads(TOY, overrides=overrides)
    launch = contract.lower(run, folder=Path("out"))
    assert launch.num_processes == run.plan.num_devices
    assert launch.argv == ("python", "-m", "meshwright.engines.maxtext.worker", "out")
    return dict(launch.files)


def keys(*overrides: str) -> dict[str, Any]:
    return YAML(typ="safe").load(lowered(*overrides)["maxtext.yml"])


def leaves(*overrides: str) -> dict[str, dict[str, Any]]:
    table = json.loads(lowered(*overrides)["parameters.json"])
    return {leaf["path"]: leaf for leaf in table["leaves"]}


def test_the_whole_configuration():
    assert keys() == YAML(typ="safe").load(GOLDEN)


def test_one_process_accumulates_and_a_pipeline_does_not():
    pipelined = keys(
        "parallel={data_shard: 2, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, sharding: parameters,"
        " recompute: full}"
    )
    assert pipelined["gradient_accumulation_steps"] == 1
    assert pipelined["per_device_batch_size"] == 4.0
    assert pipelined["num_pipeline_microbatches"] == 4
    assert pipelined["num_pipeline_repeats"] == 2
    assert pipelined["num_layers_per_pipeline_stage"] == 2


def test_axes():
    both = keys("parallel={data_shard: 2, data_replicate: 2, tensor: 2, sharding: parameters, recompute: full}")
    assert [both[f"ici_{a}_parallelism"] for a in ("data", "fsdp", "tensor_sequence")] == [2, 2, 2]
    assert both["per_device_batch_size"] == 1.0
    plain = keys("parallel={data_shard: 1, tensor: 2, sequence_parallel: false, sharding: none, recompute: full}")
    assert plain["ici_tensor_parallelism"] == 2
    assert plain["ici_fsdp_parallelism"] == 1


@pytest.mark.parametrize(("cluster", "is_megablox"), [("tpu-v5p-4x1", True), ("h100-4x1", False)])
def test_grouped_gemms_are_megablox_on_tpus_alone(cluster, is_megablox):
    """Elsewhere MaxText interprets that kernel."""
    run = runfile.loads(TOY, overrides=[f"cluster={cluster}", "parallel.data_shard=4", "batch.micro=1"])
    text = contract.lower(run, folder=Path("results")).files["maxtext.yml"]
    assert YAML(typ="safe").load(text)["megablox"] is is_megablox


LORA = ["task=lora", "lora={rank: 4, alpha: 8, targets: [query, output, down]}"]


def test_adapters_are_named_by_their_modules():
    adapted = keys(*LORA)
    assert adapted["lora"] == {
        "enable_lora": True,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "lora_module_path": "decoder/layers/(self_attention/query|self_attention/out|mlp/wo)",
    }
    assert adapted["weight_dtype"] == "bfloat16"  # frozen: nothing is added to them
    assert keys(*LORA, "precision=fp32")["weight_dtype"] == "float32"
    assert "lora" not in keys()


def test_adapters_stand_as_peft_names_them():
    found = [leaf for leaf in leaves(*LORA).values() if leaf["is_adapter"]]
    assert {leaf["path"].partition("layers/")[2]: leaf["shape"] for leaf in found} == {
        "self_attention/query/kernel_lora_a": [64, 4],
        "self_attention/query/kernel_lora_b": [4, 4, 16],
        "self_attention/out/kernel_lora_a": [64, 4],
        "self_attention/out/kernel_lora_b": [4, 64],
        "mlp/wo/kernel_lora_a": [128, 4],
        "mlp/wo/kernel_lora_b": [4, 64],
    }
    assert names(found[0])[3] == "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    assert all(leaf["grid"] == [8] for leaf in found)
    assert all(leaf["axes"] == [1] for leaf in found)
    turned = leaves("model=llama3.1-8b", "data.sequence_length=4096", *LORA).values()
    assert [leaf["path"].rpartition("layers/")[2] for leaf in turned if leaf["interleave"]] == [
        "self_attention/query/kernel",
        "self_attention/key/kernel",
        "self_attention/query/kernel_lora_b",
    ]


def test_validation_batches_are_evaluated_in_micro_batches():
    evaluated = keys("train.evaluate={every_steps: 5, num_batches: 3, target_loss: 1.5}")
    assert evaluated["eval_interval"] == 5
    assert evaluated["eval_steps"] == 12
    assert evaluated["target_eval_loss"] == 1.5


def test_experts_are_a_part_of_the_data_axis():
    mixture = keys(
        "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}",
        "parallel={data_shard: 4, expert: 2, sharding: parameters, recompute: {modules: [norm, activation, moe]}}",
    )
    assert (mixture["ici_fsdp_parallelism"], mixture["ici_expert_parallelism"]) == (2, 2)
    assert mixture["decoder_block"] == "qwen3_moe"
    assert mixture["base_moe_mlp_dim"] == mixture["base_mlp_dim"] == 32
    assert mixture["remat_policy"] == "save_dot_with_context_except_mlp"


def test_llama_31_turns_neighbouring_pairs():
    run = ["model=llama3.1-8b", "data.sequence_length=4096"]
    assert keys(*run)["rope_type"] == "llama3.1"
    assert leaves(*run)["decoder/layers/self_attention/query/kernel"]["interleave"]
    assert not leaves(*run)["decoder/layers/self_attention/value/kernel"]["interleave"]


def test_layers_of_a_scan_stand_along_the_second_axis():
    query = leaves()["decoder/layers/self_attention/query/kernel"]
    assert names(query) == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(8)]
    assert (query["shape"], query["grid"], query["axes"]) == ([64, 4, 16], [8], [1])


def test_layers_of_a_circular_pipeline_go_round():
    found = leaves(
        "parallel={data_shard: 1, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, sharding: none,"
        " recompute: full}"
    )
    for within in (0, 1):  # two layers a stage
        norm = found[f"decoder/pipeline_module/layers/layers_{within}/pre_self_attention_layer_norm/scale"]
        assert (norm["grid"], norm["axes"]) == ([2, 2], [0, 1])  # repeats, stages
        numbers = [int(name.split(".")[2]) for name in names(norm)]
        assert numbers == [within, 2 + within, 4 + within, 6 + within]


def test_experts_come_before_layers():
    found = leaves("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}")
    up = found["decoder/layers/moe_block/wi_1"]
    assert (up["grid"], up["axes"], up["shape"]) == ([4, 8], [0, 1], [64, 32])
    assert names(up)[9] == "model.layers.1.block_sparse_moe.experts.1.w3.weight"


LATENT = """model={hidden: 64, num_layers: 3, vocab: 512, ffn_hidden: 96, norm_epsilon: 1.0e-6,
attention: {kind: mla, num_heads: 4, head_dim: 24, value_head_dim: 16, query_lora_rank: 20, kv_lora_rank: 16,
 rope_head_dim: 8},
experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 2, num_dense_layers: 1, router: sigmoid}}"""


def test_latents_are_the_block_of_deepseek():
    found = keys(LATENT)
    assert (found["decoder_block"], found["attention_type"]) == ("deepseek", "mla")
    assert [found[f"qk_{part}_head_dim"] for part in ("nope", "rope")] == [16, 8]
    assert (found["base_mlp_dim"], found["base_moe_mlp_dim"], found["shared_experts"]) == (96, 32, 2)
    plain = ("rope_factor", "original_max_position_embeddings", "max_position_embeddings")
    assert [found[key] for key in plain] == [1, 256, 256]  # YARN by 1: neighbouring pairs, and no stretch
    assert (found["rope_interleave"], found["rope_attention_scaling"]) == (True, False)


def test_yarn_stretches_to_its_context_or_the_longer_sequences():
    stretch = "model.rope={scaling: yarn, factor: 4, original_context: 32, mscale: 0.5, mscale_all_dims: 0.5}"
    latent, grouped = keys(LATENT, stretch), keys(stretch)
    assert [one["max_position_embeddings"] for one in (latent, grouped)] == [256, 256]
    assert [one["rope_interleave"] for one in (latent, grouped)] == [True, False]
    assert (latent["mscale"], latent["rope_attention_scaling"]) == (0.5, False)
    assert keys(LATENT, stretch, "data.sequence_length=64")["max_position_embeddings"] == 128
    papers = keys("model.rope={scaling: yarn, factor: 4, original_context: 128}")
    assert (papers["mscale"], papers["rope_attention_scaling"]) == (0.0, True)


def test_a_routing_that_maxtext_knows_by_name_takes_no_shapes_from_the_name():
    found = lowered(LATENT, "train.balance_bias_rate=0.01")
    values = YAML(typ="safe").load(found["maxtext.yml"])
    assert YAML(typ="safe").load(found[f"models/{values['model_name']}.yml"]) == {}
    assert (values["routed_bias"], values["routed_bias_update_rate"]) == (True, 0.01)
    softmax = [LATENT, "model.experts.router=softmax", "model.experts.normalize_top_k=false"]
    assert "model_name" not in keys(*softmax)
    assert len(lowered(*softmax)) == 3


def test_dense_layers_and_those_with_experts_stand_apart():
    found = leaves(LATENT)
    queries = [leaf for path, leaf in found.items() if path.endswith("self_attention/wq_b/kernel")]
    assert [leaf["path"].split("/")[1] for leaf in queries] == ["dense_layers", "moe_layers"]
    assert [names(leaf) for leaf in queries] == [
        [f"model.layers.{i}.self_attn.q_b_proj.weight" for i in layers] for layers in ([0], [1, 2])
    ]
    bias = found["decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"]
    assert names(bias) == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)]
    assert (bias["is_state"], bias["axes"], bias["std"]) == (True, [0], 0.0)
    assert "decoder/dense_layers/mlp/wi_0/kernel" in found
    assert found["decoder/moe_layers/DeepSeekMoeBlock_0/shared_experts/wo/kernel"]["shape"] == [64, 64]


GPT_OSS = """model={family: GptOssForCausalLM, activation: clamped_swiglu, hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, bias: true, window: 32, window_pattern: [true, false], sinks: true},
experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true}}"""


def test_gpt_oss_is_scanned_in_pairs_of_a_windowed_layer_and_another():
    given = keys(GPT_OSS)
    assert (given["decoder_block"], given["sliding_window_size"]) == ("gpt_oss", 32)
    assert given["adamw_mask"] == ["scale", "bias", "sinks"]
    assert given["attention"] == "dot_product"
    found = leaves(GPT_OSS)
    for pair, numbers in enumerate(((0, 2), (1, 3))):
        sinks = found[f"decoder/layers/layers_{pair}/GptOssAttention/sinks"]
        assert names(sinks) == [f"model.layers.{i}.self_attn.sinks" for i in numbers]
    home = "decoder/layers/layers_0/GptOssMlp"
    fused = [found[f"{home}/wi_{i}"] for i in range(2)]
    assert [(leaf["name"].rpartition(".")[2], leaf["column"]) for leaf in fused] == [
        ("gate_up_proj", 0),
        ("gate_up_proj", 1),
    ]
    tensor = np.arange(4 * 64 * 64, dtype="float32").reshape(4, 64, 64)
    made_of = [leaf_array(leaf | {"grid": [1], "layers": [0]}, {names(leaf)[0]: tensor}, numpy=np) for leaf in fused]
    assert (made_of[0][:, 0] == tensor[..., ::2]).all()
    assert (made_of[1][:, 0] == tensor[..., 1::2]).all()


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_tensors_of_a_file_are_those_that_the_native_engine_reads(family):
    pytest.importorskip("torch")
    from meshwright.engines.maxtext.parameters.leaves import file_shapes
    from meshwright.training.weights.reading import shapes_of

    mixture = ["model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "model.attention.qk_norm=true"]
    made_of = {"LlamaForCausalLM": [], "Qwen3MoeForCausalLM": mixture, "DeepseekV3ForCausalLM": [LATENT]}
    model = runfile.loads(TOY, overrides=[*made_of[family], f"model.family={family}"]).model
    assert file_shapes(model) == shapes_of(model)


def test_every_number_of_the_model_stands_once():
    from meshwright.cost.flops import count_parameters
    from meshwright.cost.tables import model_row

    for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "kimi-k2"):
        found = leaves(f"model={name}", "data.sequence_length=4096")
        total = 0
        for leaf in found.values():
            size = 1
            for n in (*leaf["shape"], *leaf["grid"]):
                size *= n
            total += 0 if leaf["is_state"] else size
        model = runfile.loads(TOY, overrides=[f"model={name}", "data.sequence_length=4096"]).model
        assert total == int(count_parameters(model_row(model)).total)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.rope={scaling: llama3, factor: 8, original_context: 8192}"],
        ["model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "model.attention.qk_norm=true"],
        ["parallel={data_shard: 1, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, sharding: none,"
         " recompute: full}", "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}"],
        [LATENT],
        ["model.rope={scaling: llama3, factor: 8, original_context: 8192}", "task=lora",
         "lora={rank: 4, alpha: 8, targets: [query, key, value, output, gate, up, down]}"],
    ],
    ids=["dense", "experts", "pipeline", "latents", "adapters"],
)  # fmt: skip
def test_weights_come_out_as_they_went_in(overrides):
    for leaf in leaves(*overrides).values():
        joined = 2 if leaf["path"].endswith("out/kernel") else 1
        rows, columns = math.prod(leaf["shape"][:joined]), math.prod(leaf["shape"][joined:])
        shape = (columns, rows) if leaf["transpose"] else leaf["shape"]
        tensors = {name: np.random.default_rng(i).random(shape, dtype="float32") for i, name in enumerate(names(leaf))}
        array = leaf_array(leaf, tensors, numpy=np)
        assert array.size == math.prod(leaf["grid"]) * math.prod(leaf["shape"])
        back = leaf_tensors(leaf, array)
        assert back.keys() == tensors.keys()
        assert all((back[name] == tensors[name]).all() for name in tensors), leaf["path"]


def test_drawn_weights_and_checkpoints():
    table = json.loads(lowered("train.checkpoint=null")["parameters.json"])
    assert (table["is_drawn"], table["seed"]) == (True, 7)
    assert keys("train.checkpoint=null")["checkpoint_period"] == 10**9
    assert not json.loads(lowered("weights=start")["parameters.json"])["is_drawn"]


def maxtext_rate(given: dict[str, Any], *, count: int, num_steps: int, peak: float) -> float:
    """MaxText 0.2.5's schedule, from its documentation: warm-up from 0, then cosine, or stable and linear."""
    whole = num_steps + 1
    warm = int(whole * given["warmup_steps_fraction"])
    final = given["learning_rate_final_fraction"]
    if count < warm:
        return peak * count / warm
    if given["lr_schedule_type"] == "cosine":
        part = (count - warm) / (whole - warm - 1) if whole - warm > 1 else 1.0
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part)))
    falls = int(whole * given["wsd_decay_steps_fraction"])
    if count < whole - falls:
        return peak
    return peak * (1 - (1 - final) * (count - (whole - falls)) / (falls - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warm", "num_steps"), [(0, 10), (3, 10), (4, 20), (7, 1000), (2000, 12345)])
def test_rates_are_those_of_the_native_engine(schedule, warm, num_steps):
    pytest.importorskip("torch")
    from meshwright.training.optimizer import learning_rate

    o = Optimizer(learning_rate=1e-3, schedule=schedule, warmup_steps=warm, final_ratio=0.1, decay_ratio=0.2)
    given = schedule_keys(o, num_steps=num_steps)
    assert given["warmup_steps_fraction"] + given.get("wsd_decay_steps_fraction", 0) <= 1
    for step in range(num_steps):
        mine = maxtext_rate(given, count=step + 1, num_steps=num_steps, peak=1e-3)
        native = learning_rate(o, step=step, num_steps=num_steps)
        assert math.isclose(mine, native, rel_tol=1e-9, abs_tol=1e-12), step


def test_a_fraction_gives_its_part_back():
    for whole in (3, 7, 10, 21, 1001, 12346):
        for part in range(0, whole + 1, max(1, whole // 50)):
            assert int(whole * fraction_for(whole, part)) == part


def test_lowering_is_pure_and_imports_no_framework():
    assert lowered() == lowered()
    assert not Path("out").exists()
    assert "jax" not in sys.modules


def test_weights_without_masters_have_sixteen_bits():
    launch = contract.lower(runfile.loads(TOY, overrides=["optimizer.master_weights=false"]), folder=Path("out"))
    assert YAML().load(launch.files["maxtext.yml"])["weight_dtype"] == "bfloat16"


def test_activations_in_host_memory_are_tensors_with_a_place():
    overrides = ["stack.offloaded_activations=1", "parallel.recompute={modules: [norm, activation, mlp]}"]
    keys = YAML().load(contract.lower(runfile.loads(TOY, overrides=overrides), folder=Path("out")).files["maxtext.yml"])
    places = {
        "decoder_layer_input",
        "query_proj",
        "key_proj",
        "value_proj",
        "kv_proj",
        "qkv_proj",
        "context",
        "out_proj",
    }
    assert keys["remat_policy"] == "custom"
    assert {key for key, value in keys.items() if value == "offload"} == places


def test_tiles_of_the_loss_hold_the_tokens_that_a_run_asks_for():
    launch = contract.lower(runfile.loads(TOY, overrides=["kernels.loss_chunk=128"]), folder=Path("out"))
    assert YAML().load(launch.files["maxtext.yml"])["num_vocab_tiling"] == 2 * 256 // 128
    assert "num_vocab_tiling" not in contract.lower(runfile.loads(TOY), folder=Path("out")).files["maxtext.yml"]


@pytest.mark.parametrize(
    ("switch", "key", "value"),
    [
        ("attention=unfused", "attention", "dot_product"),
        ("attention=cudnn", "attention", "cudnn_flash_jax"),
        ("attention_tile=1024", "sa_block_kv_dkv", 1024),
        ("fuses_attention_backward=true", "sa_use_fused_bwd_kernel", True),
        ("gradient_format=bf16", "grad_dtype", "bfloat16"),
        ("dispatcher=deepep", "attention", "autoselected"),  # which it has no switch for
    ],
)
def test_switches_of_software(switch, key, value):
    launch = contract.lower(runfile.loads(TOY, overrides=[f"stack.{switch}"]), folder=Path("out"))
    assert YAML().load(launch.files["maxtext.yml"])[key] == value
