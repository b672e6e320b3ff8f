"""Configurations of Megatron-Bridge as run files: fields that are read, noted and refused, by their own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_bridge.files import DERIVED, RECIPES
from meshwright.engines.megatron.megatron_bridge.run_content import COMBINED, OPPOSITE, OPTION_NAMES, REFUSED
from meshwright.engines.megatron.megatron_core.constructors import UNFUSED
from meshwright.errors import InputError
from meshwright.specs.model import AttentionKind, RopeScaling, Router
from meshwright.specs.run import Run, Task

SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
PLAIN: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "num_layers": 4, "hidden_size": 64,
        "num_attention_heads": 4, "ffn_hidden_size": 128, "seq_length": 128, "vocab_size": 512,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": SILU, "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        **dict.fromkeys(UNFUSED, True),
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 16, "train_iters": 10},
    "optimizer": {"lr": 1e-3, "use_distributed_optimizer": True},
    "scheduler": {"start_weight_decay": 0.01, "end_weight_decay": 0.01},
    "dataset": {"seq_length": 128},
    "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "mixed_precision": "bf16_mixed",
}  # fmt: skip


def imported(source: str, cluster: str = "h100-8x1") -> tuple[Run, str]:
    found = contract.import_run(source, cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    return runfile.loads(stream.getvalue()), "\n".join(found.notes)


@pytest.fixture
def configuration(tmp_path):
    """Write PLAIN with `section.field` changed, and say where."""

    def write(changes: Mapping[str, Any] = {}, **whole: Any) -> str:
        content = {key: dict(value) if isinstance(value, dict) else value for key, value in PLAIN.items()} | whole
        for name, value in changes.items():
            section, key = name.split(".")
            content.setdefault(section, {})[key] = value
        path = tmp_path / "run_config.yaml"
        YAML().dump(content, path)
        return str(path)

    return write


def test_a_plain_one(configuration):
    run, notes = imported(configuration())
    assert notes == ""
    assert (run.model.num_layers, run.model.hidden, run.model.ffn_hidden, run.model.vocab) == (4, 64, 128, 512)
    assert (run.global_batch, run.sequence_length, run.num_steps, run.precision.name) == (16, 128, 10, "bf16")
    assert run.plan.describe() == "DP8 zero1 mbs1"


def test_every_name_here_is_one_of_theirs():
    known = {key for held in sections().values() for key in (*held.fields, *held.others, *held.latent)}
    assert OPPOSITE.keys() | OPTION_NAMES.keys() <= known
    full = {f"{section}.{key}" for section, held in sections().items() for key in held.fields}
    assert {name for pair in REFUSED for name in pair} | DERIVED.keys() | set(DERIVED.values()) <= full
    assert all(any(name.startswith(beginning) for name in full) for beginning in COMBINED)
    shared = {f"{part}.{key}" for one in RECIPES.values() for part, held in one.items() if held != "bf16_mixed"
              for key in held}  # fmt: skip
    assert shared <= full | {f"{part}.{key}" for part, held in sections().items() for key in held.others}


def test_settings_behind_the_file_and_files_of_overrides(configuration, tmp_path):
    (tmp_path / "more.yaml").write_text("train: {global_batch_size: 32}\nmodel: {tensor_model_parallel_size: 2}\n")
    path = configuration()
    run, notes = imported(f"{path} {tmp_path / 'more.yaml'} train.train_iters=7 +rng.seed=3")
    assert notes == ""
    assert (run.global_batch, run.plan.tensor, run.num_steps, run.train.seed) == (32, 2, 7, 3)


def test_overrides_alone_need_a_model(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text(
        "train: {train_iters: 9, global_batch_size: 8, micro_batch_size: 1}\noptimizer: {lr: 1e-4}\n"
        "dataset: {seq_length: 256}\nmodel: {seq_length: 256}\npeft: null\n"
    )
    with pytest.raises(InputError, match="does not contain the model") as caught:
        imported(str(path))
    assert 'more.yaml recipe=pretrain model=llama3.1-8b"' in caught.value.hint
    run, notes = imported(f"{path} model=mixtral-8x7b model.expert_model_parallel_size=4")
    assert (run.model.name, run.plan.expert, run.plan.expert_tensor, run.num_steps) == ("mixtral-8x7b", 4, 1, 9)
    assert "defaults of their classes, not of a recipe" in notes


def test_overrides_lie_over_what_recipes_of_a_kind_share(tmp_path):
    """Values of _pretrain_common and _peft_common of Megatron-Bridge 0.7."""
    path = tmp_path / "more.yaml"
    path.write_text("train: {train_iters: 900}\noptimizer: {min_lr: 0.0}\n")
    run, notes = imported(f"{path} recipe=pretrain model=llama3.2-1b +train.micro_batch_size=4")
    assert (run.precision.name, run.plan.describe()) == ("bf16", "DP8 zero1 mbs4")
    assert (run.global_batch, run.sequence_length, run.num_steps, run.train.seed) == (32, 4096, 900, 1234)
    optimizer = run.optimizer
    assert (optimizer.learning_rate, optimizer.final_ratio, optimizer.weight_decay) == (3e-4, 0.0, 0.033)
    assert (optimizer.warmup_steps, optimizer.betas) == (500, (0.9, 0.95))
    assert "all recipes of a kind share, not of one" in notes
    adapted, _ = imported(f"{path} recipe=peft model=llama3.2-1b")
    assert (adapted.lora.rank, adapted.optimizer.learning_rate, adapted.sequence_length) == (32, 1e-4, 2048)
    path.write_text("train: {train_iters: 900}\npeft: null\n")
    assert imported(f"{path} recipe=peft model=llama3.2-1b")[0].lora is None
    with pytest.raises(InputError, match=r"no kind of recipes.* got 'finetune', allowed: pretrain, sft, peft"):
        imported(f"{path} recipe=finetune model=llama3.2-1b")


def test_latent_attention_has_defaults_of_its_own(configuration):
    latent = configuration({"model._target_": "megatron.bridge.models.mla_provider.MLAModelProvider"})
    latent += " model.multi_latent_attention=true"
    run, _ = imported(f"{latent} model.num_moe_experts=8 model.moe_layer_freq=[0,1,1,1] model.kv_channels=16")
    attention = run.model.attention
    assert attention.kind is AttentionKind.MLA
    assert (attention.kv_lora_rank, attention.query_lora_rank, attention.head_dim) == (512, 512, 192)
    assert (run.model.rope.scaling, run.model.rope.factor) == (RopeScaling.YARN, 40)
    assert run.model.experts.num_dense_layers == 1
    run, _ = imported(f"{latent} model.q_lora_rank=null model.rope_type=rope")
    assert (run.model.attention.query_lora_rank, run.model.rope.scaling) == (0, RopeScaling.NONE)


def test_mixtures_and_stages(configuration):
    path = configuration({
        "model.num_moe_experts": 8, "model.moe_router_score_function": "sigmoid", "model.num_query_groups": 2,
        "model.moe_router_enable_expert_bias": True, "model.tensor_model_parallel_size": 2,
        "model.expert_model_parallel_size": 2, "model.sequence_parallel": True,
        "model.pipeline_model_parallel_size": 2, "model.recompute_granularity": "full",
        "model.recompute_method": "uniform", "model.recompute_num_layers": 1,
        "model.pipeline_model_parallel_layout": [["embedding", "decoder"], [*["decoder"] * 3, "loss"]],
        "model.transformer_layer_spec": {
            "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", "_partial_": True,
        },
    })  # fmt: skip
    run, notes = imported(path)
    assert notes == (
        "the run file does not contain model.moe_token_dispatcher_type allgather; "
        "the estimate assumes that it is alltoall\n"
        "the estimate does not include: the absence of model.moe_grouped_gemm, "
        "the absence of model.moe_permute_fusion, the absence of model.moe_router_fusion, "
        "the absence of model.moe_router_dtype fp32"
    )
    assert (run.model.experts.router, run.model.attention.num_kv_heads) == (Router.SIGMOID, 2)
    assert (run.plan.expert, run.plan.expert_tensor, run.plan.layers_per_stage) == (2, 1, (1, 3))


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("bf16-mixed", "bf16"), ("fp16_mixed", "fp16"), (None, "fp32"),
        ("bf16_with_fp8_delayed_scaling_mixed", "fp8_delayed"), ("bf16_with_fp8_current_scaling_mixed", "fp8"),
        ("bf16_with_mxfp8_mixed", "mxfp8"), ("bf16_with_fp8_subchannel_scaling_mixed", "fp8_blockwise"),
        ("bf16_with_nvfp4_mixed", "nvfp4"), ({"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"bf16": True, "fp8": "hybrid"}, "fp8"),
    ],
)  # fmt: skip
def test_precisions(configuration, precision, name):
    run, _ = imported(configuration(mixed_precision=precision), cluster="b200-8x1")
    assert run.precision.name == name


def test_data_and_checkpoints(configuration):
    run, notes = imported(configuration({
        "dataset.blend": [["tokens/train"], None], "checkpoint.save": "saved", "checkpoint.save_interval": 5,
        "train.eval_iters": 2, "validation.eval_interval": 10,
    }))  # fmt: skip
    assert (run.data.source, run.train.checkpoint.folder, run.train.checkpoint.every_steps) == (
        "tokens/train.bin",
        "saved",
        5,
    )
    assert notes == "evaluation is not carried over: 2 batches every 10 steps"
    run, notes = imported(configuration({"dataset.data_path": "a b"}))
    assert run.data.source == "synthetic"
    assert "data of a b is not carried over" in notes
    kind = "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig"
    _, notes = imported(configuration({"dataset._target_": kind, "dataset.eod_mask_loss": True}))
    assert "data of GPTSFTDatasetConfig is not" in notes
    assert "not carried over: dataset.eod_mask_loss" in notes


def test_weight_decay_is_the_schedulers(configuration):
    run, notes = imported(configuration({"optimizer.weight_decay": 0.1, "scheduler.end_weight_decay": 0.033,
                                         "scheduler.start_weight_decay": 0.033}))  # fmt: skip
    assert run.optimizer.weight_decay == 0.033
    assert notes == "optimizer.weight_decay 0.1 has no effect: scheduler.end_weight_decay is 0.033"


def test_adapters(configuration):
    lora = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 8, "alpha": 16, "target_modules": ["linear_qkv"]}
    run, notes = imported(configuration(peft=lora))
    assert (run.task, run.lora.rank, run.lora.alpha) == (Task.LORA, 8, 16)
    assert [str(target) for target in run.lora.targets] == ["qkv"]
    assert "peft without checkpoint.pretrained_checkpoint is refused by Megatron-Bridge" in notes
    _, notes = imported(configuration({"checkpoint.pretrained_checkpoint": "base"}, peft=lora))
    assert notes == "not carried over: checkpoint.pretrained_checkpoint base"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.seq_length": 64}, "model.seq_length 64 is not dataset.seq_length 128"),
        ({"model.sequence_parallel": True}, "model.sequence_parallel has no effect without tensor"),
        ({"model.moe_router_topk": 4}, "options of experts have no effect without model.num_moe_experts"),
        ({"train.train_samples": 160}, "train.train_iters and train.train_samples are both given"),
        ({"dist.use_megatron_fsdp": True, "dist.use_torch_fsdp2": True}, "dist.use_torch_fsdp2 are both given"),
        ({"ddp.use_megatron_fsdp": True, "checkpoint.save": "c"}, "needs checkpoint.ckpt_format fsdp_dtensor"),
        ({"model.fp16": True}, "model.fp16 has no effect: mixed_precision differs"),
        ({"scheduler.start_weight_decay": 0.0}, "weight decay that begins with 0.0 is not carried over"),
        ({"model.init_method_std": 0.01}, "not carried over: model.init_method_std 0.01"),
        ({"model.teacher": {"seq_length": 4}}, "not carried over: model.teacher"),
        ({"scheduler.lr_warmup_iters": 3, "scheduler.lr_warmup_samples": 3}, "Megatron-Bridge refuses them together"),
        ({"model.context_parallel_size": 8, "model.seq_length": 136, "dataset.seq_length": 136},
         "no multiple of 2 x context 8"),
        ({"ddp.overlap_param_gather": True, "optimizer.use_distributed_optimizer": False},
         "ddp.overlap_param_gather has no effect without optimizer.use_distributed_optimizer"),
    ],
)  # fmt: skip
def test_contradictions_are_noted(configuration, changes, words):
    _, notes = imported(configuration(changes))
    assert words in notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_layer": 4}, "Megatron-Bridge has no such field: got 'model.num_layer'"),
        ({"parallel.tensor": 4}, "Megatron-Bridge has no such field: got 'parallel.tensor'"),
        ({"model._target_": "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider"}, "GemmaModelProvider"),
        ({"model.activation_func": "relu"}, "model.activation_func relu with a gate"),
        ({"model.window_size": [128, 3]}, "model.window_size"),
        ({"model.vocab_size": None}, "the size of the vocabulary is in the file"),
        ({"model.hidden_size": "${oc.env:WIDTH}"}, re.escape("model.hidden_size")),
        ({"model.seq_length": [64]}, r"run_config.yaml:\d+: model.seq_length is not a whole number"),
        ({"dataset.seq_length": 1.5}, r"run_config.yaml:\d+: dataset.seq_length is not a whole number"),
        ({"optimizer.lr": None}, "the configuration lacks optimizer.lr"),
        ({"optimizer.optimizer": "muon"}, "an optimizer that run files do not support"),
        ({"train.global_batch_size": 12}, "got 'train.global_batch_size 12'"),
        ({"model.pipeline_model_parallel_size": 2, "model.num_layers": 3}, "3 layers cannot be split over 2 stages"),
        ({"peft._target_": "megatron.bridge.peft.dora.DoRA"}, "adapters that run files cannot express: got 'DoRA'"),
        ({"peft.target_modules": ["in_proj"]}, "a module that run files do not adapt"),
    ],
)  # fmt: skip
def test_what_is_refused(configuration, changes, words):
    with pytest.raises(InputError, match=words):
        imported(configuration(changes))


def test_a_name_that_is_wrong_is_told_with_its_line(configuration):
    with pytest.raises(InputError, match=r"run_config.yaml:\d+: Megatron-Bridge has no") as caught:
        imported(configuration({"optimizer.learning_rate": 1.0, "train.train_iter": 1}))
    assert caught.value.hint == "did you mean train_iters? it ignores unknown fields: --ignore train.train_iter"


def test_an_unknown_field_is_left_out_when_it_is_named(configuration):
    path = str(configuration({"train.my_own": 1}))
    assert "--ignore left out train.my_own" in "\n".join(
        contract.import_run(path, cluster="h100-8x1", ignore=["train.my_own"]).notes
    )
    with pytest.raises(InputError, match=r"this one is read: got 'optimizer\.lr'"):
        contract.import_run(path, cluster="h100-8x1", ignore=["train.my_own", "optimizer.lr"])


@pytest.mark.parametrize("source", ["recipes/llama3.py", "llama3_8b_pretrain_config", "recipes.llama:pretrain"])
def test_recipes_are_python(source):
    with pytest.raises(InputError, match="recipes of Megatron-Bridge are Python") as caught:
        contract.import_run(source, cluster="h100-8x1")
    assert "to_yaml" in caught.value.hint


def test_yaml_that_is_not_theirs_is_megatron_lms(tmp_path: Path):
    (tmp_path / "other.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="is not a configuration of Megatron-LM"):
        imported(str(tmp_path / "other.yaml"))
    with pytest.raises(InputError, match="cannot read"):
        imported(str(tmp_path / "none.yaml"))


def test_gpt_oss_is_the_catalogues(configuration):
    own = {
        "num_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "num_query_groups": 8, "kv_channels": 64,
        "ffn_hidden_size": 2880, "vocab_size": 201_088, "add_bias_linear": True, "num_moe_experts": 32,
        "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False},
        "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0, "softmax_type": "learnable",
        "moe_router_topk": 4, "moe_ffn_hidden_size": 2880, "share_embeddings_and_output_weights": False,
        "window_size": [127, 0], "window_attn_skip_freq": [1, 0] * 12, "position_embedding_type": "yarn",
        "rotary_base": 150_000, "yarn_rotary_scaling_factor": 32.0, "yarn_original_max_position_embeddings": 4096,
        "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": False,
    }  # fmt: skip
    run, notes = imported(configuration({f"model.{key}": value for key, value in own.items()}))
    assert run.model.name == "gpt-oss-20b"
    assert "yarn" not in notes
