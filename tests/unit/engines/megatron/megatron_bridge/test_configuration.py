"""Configurations of Megatron-Bridge, as they were decided for some runs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.contract import import_run
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_core.constructors import UNFUSED
from meshwright.engines.megatron.megatron_lm.arguments import RENAMED
from meshwright.specs.run import Run

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 2}
optimizer: {warmup_steps: 3}
cluster: h100-8x2
engine: megatron
parallel: {tensor: 2, pipeline: 2, expert: 4, data_shard: 4, sharding: optimizer,
  recompute: {modules: [core_attention, moe]}}
train: {steps: 10}
"""
DEEP = """model={hidden: 64, num_layers: 34, vocab: 257, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2},
rope: {scaling: llama3, factor: 8, original_context: 8192}}"""
LATENT = """model={hidden: 64, num_layers: 4, vocab: 256, ffn_hidden: 128, attention: {kind: mla, num_heads: 4,
num_kv_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 32, rope_head_dim: 8}}"""
SHARED = """model={hidden: 64, num_layers: 3, vocab: 258, ffn_hidden: 128,
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 32,
num_dense_layers: 1, num_shared: 1, router: sigmoid, routed_scale: 2.5}}"""


def files(*overrides: str) -> tuple[Run, dict[str, str]]:
    run = runfile.loads(BASE, overrides=overrides)
    return run, dict(contract.lower(run, folder=Path("out")).files)


def configuration(*overrides: str) -> dict[str, Any]:
    return YAML(typ="safe").load(files(*overrides)[1]["megatron_bridge.yaml"])


RUNS = [
    [],
    ["train.checkpoint={folder: c}", "optimizer.schedule=wsd", "data.source=a/b.bin"],
    ["model=llama3.1-8b", "parallel={data_shard: 8, tensor: 2, sharding: none, recompute: {layers: 3}}"],
    ["model=qwen3-0.6b", "parallel={data_shard: 16, sharding: optimizer}", "train.evaluate={}",
     "data.validation=v.txt", "data.source=t.txt", "optimizer.gradient_clip=null"],
    [SHARED, "parallel={data_shard: 16, expert: 8, sharding: optimizer}", "precision=fp32"],
    [DEEP, "parallel={tensor: 2, pipeline: 2, virtual_pipeline: 2, schedule: interleaved, data_shard: 4}"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", RUNS)
def test_every_name_is_a_field_of_its_section(overrides):
    found = configuration(*overrides)
    assert found.pop("_target_") == "megatron.bridge.training.config.ConfigContainer"
    assert found.pop("mixed_precision", None) == (None if "precision=fp32" in overrides else "bf16_mixed")
    for name, section in found.items():
        assert section.pop("_target_") == sections()[name].target
        assert section.keys() <= sections()[name].fields.keys()


@pytest.mark.parametrize("overrides", RUNS)
def test_it_says_what_the_arguments_of_megatron_lm_say(overrides):
    _, texts = files(*overrides)
    found = YAML(typ="safe").load(texts["megatron_bridge.yaml"])
    flat = {key: value for name in found if isinstance(found[name], dict) for key, value in found[name].items()}
    flat |= found["model"] | found["rng"]
    options = {theirs: ours for ours, theirs in RENAMED.items()}
    compared = 0
    for line in texts["megatron_lm.args"].splitlines():
        name, *words = line.removeprefix("--").split()
        key = options.get(name, name.replace("-", "_"))
        if key not in flat or key == "vocab_size":  # of Megatron-LM the model's, of Bridge the padded one
            continue
        value, compared = flat[key], compared + 1
        if key == "moe_layer_freq" and isinstance(value, list):
            assert eval(words[0]) == value
        elif isinstance(value, bool):
            assert (value, words) == (True, []), key
        else:
            assert words == [str(one) for one in (value if isinstance(value, list) else [value])], key
    assert compared > 30


def test_a_mixture_under_every_axis():
    found = configuration()
    model = found["model"]
    assert (model["num_moe_experts"], model["expert_model_parallel_size"], model["rotary_base"]) == (128, 4, 1_000_000)
    assert model["pipeline_model_parallel_layout"] == f"E{'t' * 24}|{'t' * 24}L"
    assert model["activation_func"] == {"_target_": "torch.nn.functional.silu", "_call_": False}
    assert "transformer_layer_spec" not in model
    assert found["ddp"]["use_distributed_optimizer"] is found["optimizer"]["use_distributed_optimizer"] is True
    assert found["scheduler"]["end_weight_decay"] == found["optimizer"]["weight_decay"]
    assert found["scheduler"]["lr_warmup_iters"] == 3
    assert found["tokenizer"] == {
        "_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 151936,
    }
    assert found["dataset"]["seq_length"] == model["seq_length"] == 4096


@pytest.mark.parametrize("overrides", RUNS)
def test_the_kernels_are_those_of_the_estimate(overrides):
    model = configuration(*overrides)["model"]
    assert all(model[key] is True for key in UNFUSED)
    assert model["cross_entropy_loss_fusion"] is ("precision=fp32" not in overrides)


def test_graphs_have_the_random_numbers_that_they_need():
    """GPTModelProvider.provide refuses them otherwise."""
    found = {}
    for kind in ("none", "partial", "full"):
        run = runfile.loads(BASE, overrides=[f"stack.cuda_graphs={kind}", "parallel.recompute=none"])
        text = contract.lower_export(run, folder=Path("out")).files["megatron_bridge.yaml"]
        found[kind] = "use_te_rng_tracker: true" in text
    assert found == {"none": False, "partial": True, "full": True}


def test_graphs_of_the_whole_iteration_run_without_the_check_of_the_loss(tmp_path):
    """`validate_args` of Megatron-LM and `ConfigContainer.validate` of Megatron-Bridge refuse them with it."""
    for kind in ("none", "partial", "full"):
        run = runfile.loads(BASE, overrides=[f"stack.cuda_graphs={kind}", "parallel.recompute=none"])
        files = contract.lower_export(run, folder=Path("out")).files
        assert ("check_for_nan_in_loss: false" in files["megatron_bridge.yaml"]) is (kind == "full")
        assert ("--no-check-for-nan-in-loss-and-grad" in files["megatron_lm.args"]) is (kind == "full")
        (tmp_path / "megatron_lm.args").write_text(files["megatron_lm.args"])
        found = import_run(str(tmp_path / "megatron_lm.args"), cluster="h100-8x2")
        assert not any("check-for-nan" in note for note in found.notes)


@pytest.mark.parametrize("name", ["megatron_bridge.yaml", "megatron_lm.args"])
def test_rotations_of_latent_attention_are_fused_under_yarn(name):
    """MLATransformerConfig refuses them otherwise."""
    plan = "parallel={data_shard: 16, sharding: optimizer}"
    off = {"megatron_bridge.yaml": "apply_rope_fusion: false", "megatron_lm.args": "--no-rope-fusion"}[name]
    for model, fused in ((LATENT, False), ("model=deepseek-v2-lite", True)):
        run = runfile.loads(BASE, overrides=[model, plan])
        assert (off in contract.lower_export(run, folder=Path("out")).files[name]) is not fused


def test_a_vocabulary_that_does_not_divide_is_padded_by_bridge():
    """`calculate_padded_vocab_size` rounds up to the tensor ranks times the divisor."""
    found = configuration(*RUNS[5])
    assert (found["model"]["vocab_size"], found["tokenizer"]["vocab_size"]) == (257, 257)
    assert (found["model"]["should_pad_vocab"], found["model"]["make_vocab_size_divisible_by"]) == (True, 1)
    assert (found["model"]["overlap_p2p_comm"], found["model"]["virtual_pipeline_model_parallel_size"]) == (True, 2)
    assert (found["model"]["rope_scaling"], found["model"]["rope_scaling_factor"]) == (True, 8.0)


def test_dense_layers_before_mixtures_have_a_specification_of_their_own():
    model = configuration(*RUNS[4])["model"]
    assert model["moe_layer_freq"] == [0, 1, 1]
    assert model["transformer_layer_spec"]["_target_"].endswith("gpt_layer_specs.get_gpt_decoder_block_spec")


def test_data():
    tokens = configuration(*RUNS[1])
    assert (tokens["dataset"]["data_path"], tokens["dataset"]["split"]) == ("a/b", "969,30,1")
    assert (tokens["checkpoint"]["save"], tokens["checkpoint"]["save_interval"]) == ("c", 1000)
    text = configuration(*RUNS[3])
    assert text["dataset"]["data_path"] == text["tokenizer"]["tokenizer_model"] == "???"  # OmegaConf: must be said
    assert text["validation"]["eval_iters"] == 16
    assert text["optimizer"]["clip_grad"] == 0.0


def test_the_script_reads_the_configuration_beside_it():
    _, texts = files()
    tree = ast.parse(texts["megatron_bridge.py"])
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert said & texts.keys() == {"megatron_bridge.yaml"}
