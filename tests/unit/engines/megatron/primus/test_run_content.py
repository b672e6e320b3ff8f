"""Configurations of Primus as run files: merged files, fields that its patches set, and what is noted or refused."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.errors import InputError
from meshwright.specs.run import Run

MODULE = {
    "trainable": True, "micro_batch_size": 2, "global_batch_size": 128, "lr": 2.5e-4, "min_lr": 0.0, "bf16": True,
    "train_iters": 1000, "lr_warmup_iters": 0, "lr_decay_style": "cosine", "weight_decay": 0.01, "seq_length": 128,
    "use_distributed_optimizer": False, "exit_interval": 7, "log_throughput": False, "patch_zero_bubble": False,
    "enable_zb_runtime": True, "save": None, "no_save_optim": None, "stderr_sink_level": "INFO",
}  # fmt: skip
SHARED = {
    "model_type": "gpt", "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "swiglu": True,
    "position_embedding_type": "learned_absolute", "add_bias_linear": False, "normalization": "LayerNorm",
    "group_query_attention": False, "num_query_groups": None, "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "num_experts": None, "moe_router_topk": 2, "vocab_size": None,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": True,
    "moe_token_dispatcher_type": "allgather", "final_logit_softcapping": None, "rotary_base": 10000,
    "apply_rope_fusion": True, "tokenizer_type": None, "tokenizer_model": None, "norm_epsilon": 1.0e-5,
}  # fmt: skip
TINY = {
    "extends": ["tiny_base.yaml"], "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4,
    "tokenizer_type": "Llama3Tokenizer", "tokenizer_model": "meta-llama/Llama-3.1-8B",
}  # fmt: skip
BASE = {
    "extends": ["language_model.yaml"], "group_query_attention": True, "num_query_groups": 2, "rotary_base": 500000,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = StringIO()
    YAML().dump(content, stream)
    path.write_text(stream.getvalue(), encoding="utf-8")


def checkout(folder: Path, *, model: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """Write a checkout with one configuration; return the configuration's file."""
    presets = folder / "primus/configs"
    write(presets / "modules/megatron/trainer_base.yaml", MODULE)
    write(presets / "modules/megatron/pre_trainer.yaml", {"extends": ["trainer_base.yaml"], "train_iters": 20})
    write(presets / "models/megatron/language_model.yaml", SHARED)
    write(presets / "models/megatron/tiny_base.yaml", BASE)
    write(presets / "models/megatron/tiny.yaml", TINY | (model or {}))
    given = {"mock_data": True, "global_batch_size": "${BATCH:64}"} | overrides
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "${MODEL:tiny}.yaml", "overrides": given}
    path = folder / "examples/tiny.yaml"
    write(path, {"work_group": "${TEAM:amd}", "modules": {"pre_trainer": trainer}})
    return path


def imported(source: object, cluster: str = "mi300x-8x1") -> tuple[Run, str]:
    found = contract.import_run(str(source), cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    return runfile.loads(stream.getvalue()), "\n".join(found.notes)


def test_the_files_are_merged_in_their_order(tmp_path):
    run, notes = imported(checkout(tmp_path, lr=1e-4, min_lr=1e-5))
    model, attention = run.model, run.model.attention
    assert (model.num_layers, model.hidden, model.ffn_hidden, model.gated_ffn) == (4, 64, 128, True)
    assert (attention.num_heads, attention.num_kv_heads, attention.bias, model.rope.theta) == (4, 2, False, 500_000)
    assert (run.num_steps, run.global_batch, run.sequence_length, run.plan.describe()) == (20, 64, 128, "DP8 ddp mbs2")
    assert (run.optimizer.learning_rate, run.optimizer.final_ratio, run.precision.name) == (1e-4, 0.1, "bf16")
    assert run.stack.framework == "primus-megatron"
    assert "not carried over" not in notes  # `exit_interval` is what all configurations have
    assert "--" not in notes


def test_variables_and_fields_after_the_file(tmp_path):
    path = checkout(tmp_path)
    run, _ = imported(f"{path} BATCH=32 lr=1e-3 tensor_model_parallel_size=2")
    assert (run.global_batch, run.optimizer.learning_rate, run.plan.describe()) == (32, 1e-3, "TP2 DP4 ddp mbs2")
    path = checkout(tmp_path, global_batch_size="${BATCH}", lr="${RATE}")
    with pytest.raises(InputError, match="needs variables: got 'BATCH, RATE'") as caught:
        imported(path)
    assert caught.value.hint == '"tiny.yaml BATCH=... RATE=..."'
    with pytest.raises(InputError, match="not a setting of a configuration: got 'fast'"):
        imported(f"{path} fast")


def test_a_configuration_that_extends_another(tmp_path):
    path = checkout(tmp_path, lr=1e-4)
    more = {"pre_trainer": {"overrides": {"bf16": False}}}
    write(path.with_name("more.yaml"), {"extends": "tiny.yaml", "modules": more})
    run, _ = imported(path.with_name("more.yaml"))
    assert (run.precision.name, run.optimizer.learning_rate) == ("fp32", 1e-4)


def test_fields_that_patches_set(tmp_path):
    assert imported(checkout(tmp_path))[0].model.vocab == 131_072  # of mock data
    assert imported(checkout(tmp_path, vocab_size=640))[0].model.vocab == 640
    run, notes = imported(checkout(tmp_path, mock_data=False))
    assert (run.model.vocab, "of llama3.1-8b are assumed" in notes) == (128_256, True)
    run, notes = imported(checkout(tmp_path, data_parallel_replicate_degree=2, use_torch_fsdp2=True))
    assert (run.plan.data_replicate, run.plan.data_shard, run.plan.sharding.name) == (2, 4, "PARAMETERS")
    assert "sequence_parallel" not in notes  # it is on by default, and off without tensor parallelism
    run, _ = imported(checkout(tmp_path, tensor_model_parallel_size=2))
    assert run.plan.sequence_parallel


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "expert_model_parallel_size": 8}


@pytest.mark.parametrize(
    "switches", [{"use_turbo_deepep": True}, {"turbo_sync_free_moe_stage": 2, "use_turbo_grouped_gemm": True}]
)
def test_its_dispatcher_is_deepep(switches, tmp_path):
    run, notes = imported(checkout(tmp_path, model=EXPERTS, enable_primus_turbo=True, **switches))
    assert run.stack.features.dispatcher.value == "deepep"
    for name, value in switches.items():
        assert f"{name}: {value}" in notes
    run, _ = imported(checkout(tmp_path, model=EXPERTS, **switches))  # its kernels are not enabled
    assert run.stack.features.dispatcher.value == "all-to-all"


def test_what_is_noted(tmp_path):
    changes = {
        "NVTE_X": 1,
        "use_turbo_attention": True,
        "log_avg_skip_iterations": 2,
        "init_method_std": 0.01,
        "norm_epsilon": 1e-6,
    }
    run, notes = imported(checkout(tmp_path, **changes))
    assert run.model.norm_epsilon == 1e-5
    assert "no field of Megatron-LM, which Primus does not pass on: NVTE_X 1, norm_epsilon 1e-06" in notes
    assert "not carried over: init_method_std 0.01" in notes
    assert "use_turbo_attention: True" in notes
    assert "log_avg" not in notes
    assert imported(checkout(tmp_path, layernorm_epsilon=1e-6))[0].model.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ({}, {"patch_zero_bubble": True}, "cannot express: got 'patch_zero_bubble: True'"),
        ({"final_logit_softcapping": 30.0}, {}, "got 'final_logit_softcapping: 30.0'"),
        ({"hyper_connections": 4, "sinks": True}, {}, "got 'hyper_connections: 4, sinks: True'"),
        ({"model_type": "mamba"}, {"use_sink_attention": True}, "got 'model_type: mamba'"),
        ({}, {"spec": ["a.b", "c"]}, 'got "spec: '),
        ({}, {"lora": {"enabled": True, "target_modules": ["router"]}}, "do not adapt: got 'router'"),
        ({}, {"tensor_model_parallel_size": 3}, "pipeline 1 x context 1 = 3'\nhint: --cluster mi300x-3x1 would do"),
        ({}, {"optimizer": "muon"}, "an optimizer"),
        ({}, {"softmax_type": "off-by-one"}, "a model that run files cannot express: softmax_type"),
        ({}, {"lr": None}, "lack lr"),
        ({"tokenizer_model": "my/own"}, {"mock_data": False}, '"tiny.yaml vocab_size=32000"'),
    ],
)
def test_what_is_refused(model, changes, words, tmp_path):
    with pytest.raises(InputError, match=re.escape(words)):
        imported(checkout(tmp_path, model=model, **changes))


def test_a_fine_tuning_with_adapters(tmp_path):
    lora = {"enabled": True, "dim": 16, "target_modules": ["linear_qkv", "linear_fc1"]}
    path = checkout(tmp_path, mock_data=False, sft_dataset_name="my/data", stage="sft", lora=lora)
    content = YAML(typ="safe").load(path)
    write(path, content | {"modules": {"post_trainer": content["modules"]["pre_trainer"]}})
    run, notes = imported(path)
    assert (run.lora.rank, run.lora.alpha, run.lora.dropout) == (16, 32, 0)
    assert tuple(run.lora.targets) == ("qkv", "gate", "up")
    assert "data of my/data are not carried over: all sequences have 128 tokens, which are random" in notes
    latent = {"multi_latent_attention": True, "kv_lora_rank": 16, "group_query_attention": False}
    run, _ = imported(checkout(tmp_path, model=latent, lora={"enabled": True}))
    assert tuple(run.lora.targets) == ("output", "gate", "up", "down")
    path = checkout(tmp_path, lora={"enabled": False, "dim": 16})
    assert imported(path)[0].lora is None


def test_files_that_are_none(tmp_path):
    path = checkout(tmp_path)
    content = YAML(typ="safe").load(path)
    for module, words in (
        ({"framework": "torchtitan", "config": "pre_trainer.yaml", "model": "x.yaml"}, "got 'framework: torchtitan'"),
        ({"framework": "megatron", "config": "pre_trainer.yaml", "model": "absent"}, r"models/megatron/absent\.yaml"),
    ):
        write(path, content | {"modules": {"pre_trainer": module}})
        with pytest.raises(InputError, match=words):
            imported(path)
    write(path, content | {"modules": {"server": {}}})
    with pytest.raises(InputError, match="no module of Primus that trains: got 'server'"):
        imported(path)
    path = checkout(tmp_path / "inside")
    outside = tmp_path / "alone/tiny.yaml"
    write(outside, content)
    (tmp_path / "primus").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="names a file that is not here") as caught:
        imported(outside)
    assert 'tiny.yaml PRIMUS_PATH=FOLDER"' in caught.value.hint
    assert imported(f"{outside} PRIMUS_PATH={tmp_path / 'inside'}")[0].model == imported(path)[0].model


def test_an_unknown_field_is_left_out_when_it_is_named(tmp_path):
    path = str(checkout(tmp_path, model={"widening": 2}))
    with pytest.raises(InputError, match="got 'widening: 2'") as caught:
        imported(path)
    assert caught.value.hint.startswith("--ignore widening leaves out")
    found = contract.import_run(path, cluster="mi300x-8x1", ignore=["widening"])
    assert "--ignore left out widening, which is not known" in found.notes
    for name, message in (("lr", "this one is read"), ("absent", "has no such key")):
        with pytest.raises(InputError, match=f"{message}: got '{name}'"):
            contract.import_run(path, cluster="mi300x-8x1", ignore=[name])
