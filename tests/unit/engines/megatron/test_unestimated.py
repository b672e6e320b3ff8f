"""Options that change the speed or the memory and have no key in run files: one note names them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_core.constructors import UNFUSED
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.megatron_lm.model_options import UNSUPPORTED
from meshwright.engines.megatron.unestimated import EXPERTS, KERNELS, KEYS, ONLY_WITH

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x2
engine: megatron
parallel: {data_shard: 8, tensor: 2, expert: 8, expert_tensor: 1, sharding: optimizer}
train: {steps: 10}
"""
SPLIT = "parallel={data_shard: 4, context: 2, tensor: 2, expert: 8, expert_tensor: 1, sharding: optimizer}"
WITHOUT_YARN = (
    "model={hidden: 64, num_layers: 4, vocab: 256, ffn_hidden: 128, attention: {kind: mla, num_heads: 4, "
    "num_kv_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 32, rope_head_dim: 8}}",
    "parallel={data_shard: 16, sharding: optimizer}",
)
BEGINNING = "the estimate does not include: "


def script(folder: Path, *more: str, without: tuple[str, ...] = (), overrides: tuple[str, ...] = ()) -> Path:
    run = runfile.loads(BASE, overrides=overrides)
    lines = contract.lower_export(run, folder=folder).files["megatron_lm.args"].splitlines()
    kept = [line for line in lines if line.split()[0] not in without]
    (folder / "megatron_lm.args").write_text("\n".join([*kept, *more]) + "\n")
    return folder / "megatron_lm.args"


def left_out(path: Path) -> list[str]:
    """Return the settings that the only note of an import names."""
    notes = contract.import_run(str(path), cluster="h100-8x2").notes
    if not notes:
        return []
    (note,) = notes
    assert note.startswith(BEGINNING)
    return note.removeprefix(BEGINNING).split(", ")


@pytest.mark.parametrize(
    "option",
    [
        "--no-rope-fusion", "--no-bias-swiglu-fusion", "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion", "--cross-entropy-fusion-impl te",
        "--distributed-backend gloo", "--ddp-bucket-size 1000000", "--ddp-num-buckets 4", "--deterministic-mode",
        "--use-nccl-ub",
        "--moe-shared-expert-overlap", "--moe-use-legacy-grouped-gemm", "--moe-router-padding-for-fp8",
        "--moe-router-dtype fp64", "--nccl-communicator-config-path c.yaml", "--high-priority-stream-groups dp_cp ep",
        "--timing-log-level 2", "--log-num-zeros-in-grad", "--tp-comm-overlap-cfg c.yaml", "--rerun-mode "
        "report_determinism_stats", "--fp32-residual-connection", "--fine-grained-activation-offloading",
        "--no-check-for-nan-in-loss-and-grad", "--empty-unused-memory-level 2", "--use-legacy-models",
        "--moe-deepep-num-sms 24",
    ],
)  # fmt: skip
def test_an_option_without_a_key_is_named(option, tmp_path):
    assert left_out(script(tmp_path, option)) == [option]


@pytest.mark.parametrize(("precision", "named"), [("bf16", True), ("fp32", False)])
def test_the_fused_loss_is_named_where_it_is_absent_and_the_estimate_has_it(precision, named, tmp_path):
    dense = ("model=qwen3-8b", "parallel={data_shard: 8, tensor: 2, sharding: optimizer}", f"precision={precision}")
    path = script(tmp_path, without=("--cross-entropy-loss-fusion",), overrides=dense)
    assert left_out(path) == (["the absence of --cross-entropy-loss-fusion"] if named else [])
    assert left_out(script(tmp_path, overrides=dense)) == []


def test_fused_rotations_of_latent_attention_are_missed_only_where_they_exist(tmp_path):
    plan = "parallel={expert: 8, data_shard: 16, sharding: optimizer}"
    with_yarn = ("model=deepseek-v2-lite", plan)
    assert left_out(script(tmp_path, overrides=with_yarn)) == []
    assert left_out(script(tmp_path, "--no-rope-fusion", overrides=with_yarn)) == ["--no-rope-fusion"]
    for name in ("megatron_lm.args", "megatron_bridge.yaml"):
        files = contract.lower_export(runfile.loads(BASE, overrides=WITHOUT_YARN), folder=tmp_path).files
        (tmp_path / name).write_text(files[name])
        assert left_out(tmp_path / name) == [], name


def test_one_note_names_all(tmp_path):
    path = script(tmp_path, "--deterministic-mode", "--use-sharp", without=("--moe-permute-fusion",))
    assert left_out(path) == ["--deterministic-mode", "--use-sharp", "the absence of --moe-permute-fusion"]


@pytest.mark.parametrize("option", ["--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"])
def test_kernels_of_experts_that_are_absent_are_named(option, tmp_path):
    """Without `--moe-grouped-gemm`, experts are multiplied one after the other."""
    assert left_out(script(tmp_path, without=(option,))) == [f"the absence of {option}"]
    dense = ("model=qwen3-8b", "parallel={data_shard: 8, tensor: 2, sharding: optimizer}")
    assert left_out(script(tmp_path, overrides=dense)) == []


@pytest.mark.parametrize(
    "option",
    [
        "--cp-comm-type p2p", "--distributed-backend nccl", "--cross-entropy-fusion-impl native",
        "--timing-log-level 0", "--rerun-mode validate_results", "--optimizer-offload-fraction 1.0",
        "--log-interval 5", "--num-workers 8", "--cp-comm-type a2a", "--fp8-amax-history-len 1024", "--manual-gc",
        "--ckpt-format torch_dist", "--moe-deepep-num-sms 20",
        "--make-vocab-size-divisible-by 64",
    ],
)  # fmt: skip
def test_what_the_estimate_stands_for_and_what_has_no_effect_is_not(option, tmp_path):
    assert left_out(script(tmp_path, option)) == []


def test_options_count_where_they_have_an_effect(tmp_path):
    path = script(tmp_path, "--cp-comm-type a2a", overrides=(SPLIT,))
    assert left_out(path) == ["--cp-comm-type a2a"]
    path = script(tmp_path, "--fp8-format hybrid", "--fp8-amax-history-len 1024")
    assert left_out(path) == ["--fp8-amax-history-len 1024"]
    staged = ("model=qwen3-8b", "parallel={data_shard: 2, pipeline: 4, virtual_pipeline: 3, tensor: 2, "
              "schedule: interleaved}")  # fmt: skip
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert left_out(script(tmp_path, f"{group} 4", overrides=staged)) == []
    assert left_out(script(tmp_path, f"{group} 8", overrides=staged)) == [f"{group} 8"]


def test_rows_that_only_fill_the_vocabulary_are_named(tmp_path):
    rows = "rows by which --make-vocab-size-divisible-by"
    path = script(tmp_path, without=("--make-vocab-size-divisible-by",))
    assert left_out(path) == [f"128 {rows} 128 fills the vocabulary"]  # of two ranks: multiples of 256
    path = script(tmp_path, "--make-vocab-size-divisible-by 1000")
    assert left_out(path) == [f"64 {rows} 1000 fills the vocabulary"]


def test_fsdp2_that_keeps_gathered_parameters(tmp_path):
    path = script(tmp_path, "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward")
    found = contract.import_run(str(path), cluster="h100-8x2")
    assert found.content["parallel"]["sharding"] == "gradients"
    assert not found.notes


def test_recomputed_layers_of_experts_by_their_older_option(tmp_path):
    found = contract.import_run(str(script(tmp_path, "--moe-layer-recompute")), cluster="h100-8x2")
    assert found.content["parallel"]["recompute"] == {"modules": ["moe"]}
    assert not found.notes


def configuration(folder: Path, **changes: object) -> Path:
    run = runfile.loads(BASE)
    content = YAML().load(contract.lower_export(run, folder=folder).files["megatron_bridge.yaml"])
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    YAML().dump(content, folder / "run_config.yaml")
    return folder / "run_config.yaml"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"model__moe_permute_fusion": False}, ["the absence of model.moe_permute_fusion"]),
        ({"model__moe_grouped_gemm": False}, ["the absence of model.moe_grouped_gemm"]),
        ({"model__apply_rope_fusion": True, "model__persist_layer_norm": True}, []),
        ({"model__apply_rope_fusion": False}, ["model.apply_rope_fusion: false"]),
        ({"model__cross_entropy_loss_fusion": False}, ["the absence of model.cross_entropy_loss_fusion"]),
        ({"model__batch_p2p_sync": False}, ["model.batch_p2p_sync: false"]),
        ({"model__fp16_lm_cross_entropy": True}, ["model.fp16_lm_cross_entropy"]),
        ({"ddp__nccl_ub": True, "ddp__bucket_size": 5}, ["ddp.nccl_ub", "ddp.bucket_size 5"]),
        ({"ddp__gradient_reduce_div_fusion": False}, ["ddp.gradient_reduce_div_fusion: false"]),
        ({"ddp__check_for_nan_in_grad": True}, ["ddp.check_for_nan_in_grad"]),
        ({"comm_overlap__tp_comm_overlap": False, "comm_overlap__bucket_size": 5}, ["comm_overlap.bucket_size 5"]),
        ({"logger__timing_log_level": 2}, ["logger.timing_log_level 2"]),
        ({"model__variable_seq_lengths": True}, ["model.variable_seq_lengths"]),
        ({"model__make_vocab_size_divisible_by": 1000}, []),
        ({"model__make_vocab_size_divisible_by": 1000, "model__should_pad_vocab": True},
         ["64 rows by which model.make_vocab_size_divisible_by 1000 fills the vocabulary"]),
        ({"train__manual_gc_eval": False, "checkpoint__save_optim": False}, []),
    ],
)  # fmt: skip
def test_a_field_of_bridge_is_named(changes, named, tmp_path):
    assert left_out(configuration(tmp_path, **changes)) == named


@pytest.mark.parametrize("key", [key for key in UNFUSED if key != "masked_softmax_fusion"])
def test_a_field_that_a_whole_file_lacks_has_the_default_of_its_class(key, tmp_path):
    """Of the class of GPT models; a file of overrides is one of a recipe, which has the fusions."""
    path = configuration(tmp_path)
    content = YAML().load(path)
    del content["model"][key]
    YAML().dump(content, path)
    is_off = sections()["model"].fields[key] is False
    assert left_out(path) == ([f"model.{key}: false"] if is_off else [])


def test_the_recipe_of_mxfp8_names_its_buffer_of_gathers(tmp_path):
    path = configuration(tmp_path, mixed_precision="bf16_with_mxfp8_mixed")
    gathered, note = contract.import_run(str(path), cluster="b200-8x2").notes
    assert "fp8_param_gather under mxfp8" in gathered
    assert note == f"{BEGINNING}optimizer.reuse_grad_buf_for_mxfp8_param_ag"


@pytest.mark.parametrize("section", ["nvrx_straggler", "tensor_inspect"])
def test_sections_of_bridge_that_are_switched_on_are_named(section, tmp_path):
    path = configuration(tmp_path, **{f"{section}__enabled": True})
    assert left_out(path) == [f"{section}.enabled"]
    assert left_out(configuration(tmp_path, **{f"{section}__enabled": False})) == []


ENDS = ["model.first_last_layers_bf16"]


@pytest.mark.parametrize(
    ("recipe", "precision", "named"),
    [
        ("bf16_with_fp8_current_scaling_mixed", "fp8", ENDS),
        ("bf16-with-fp8-current-scaling-mixed", "fp8", ENDS),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", "fp8_blockwise", ENDS),
        ("nemotron_3_super_bf16_with_nvfp4_mixed", "nvfp4", ENDS),
        ("bf16_with_nvfp4_mixed", "nvfp4", []),
        (
            "bf16_with_fp8_delayed_scaling_mixed",
            "fp8_delayed",
            ["model.fp8_amax_history_len 1024", "model.fp8_amax_compute_algo max"],
        ),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8_blockwise", []),
        ("bf16_mixed", "bf16", []),
    ],
)
def test_what_recipes_set_besides_the_format_is_named(recipe, precision, named, tmp_path):
    path = configuration(tmp_path)
    content = YAML().load(path)
    content["mixed_precision"] = recipe
    YAML().dump(content, path)
    assert left_out(path) == named
    assert contract.import_run(str(path), cluster="h100-8x2").content["precision"] == precision


def test_experts_of_bridge_that_are_padded_to_their_capacity(tmp_path):
    path = configuration(tmp_path, model__moe_expert_capacity_factor=1.5, model__moe_pad_expert_input_to_capacity=True)
    found = contract.import_run(str(path), cluster="h100-8x2")
    assert found.content["stack"]["capacity_factor"] == 1.5
    assert not found.notes


def test_every_name_stands_once_and_is_one_of_theirs():
    fields = {key for held in sections().values() for key in (*held.fields, *held.others)}
    bridge = {name for key in fields for name in (key.replace("_", "-"), f"no-{key.replace('_', '-')}")}
    assert not KEYS.harmless & KEYS.unestimated.keys()
    assert not (KEYS.harmless | KEYS.unestimated.keys()) & {*UNSUPPORTED}
    classified = KEYS.harmless | KEYS.unestimated.keys() | EXPERTS.keys() | KERNELS.keys()
    assert classified <= known_names(later=True).keys() | bridge
    assert known_names().keys() >= {*ONLY_WITH.values()}
    assert KEYS.unestimated.keys() >= ONLY_WITH.keys()
    assert fields >= {*UNFUSED}
    for prefix in KEYS.harmless_prefixes:
        assert any(name.startswith(prefix) for name in known_names(later=True)), prefix
