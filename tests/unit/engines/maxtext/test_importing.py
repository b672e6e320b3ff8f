"""MaxText's configurations as run files: its own models, our exports, and what is noted or refused."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.engines.local import write_files
from meshwright.engines.maxtext import contract, environment
from meshwright.engines.maxtext.config.keys import known_keys, own_models
from meshwright.engines.maxtext.facts import FACTS
from meshwright.engines.maxtext.lower import configuration
from meshwright.errors import InputError, RunFileError
from meshwright.specs.features import AttentionKernel, Features, WireFormat
from meshwright.specs.model import RopeScaling
from meshwright.specs.run import Run

NAMES = """
    llama2-70b llama3-8b llama3-70b llama3.1-8b llama3.1-70b llama3.1-405b mixtral-8x7b mixtral-8x22b qwen3-0.6b
    qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b deepseek2-16b deepseek3-671b kimi-k2-1t gpt-oss-20b
"""
PUBLISHED = {name: own_models()[name] for name in NAMES.split()}


def imported(source: str, cluster: str = "h100-8x1") -> tuple[Run, tuple[str, ...]]:
    found = contract.import_run(source, cluster=cluster)
    stream = StringIO()
    YAML().dump(found.content, stream)
    return runfile.loads(stream.getvalue()), found.notes


def written(folder: Path, values: dict[str, Any], name: str = "config.yml") -> str:
    stream = StringIO()
    YAML().dump(values, stream)
    (folder / name).write_text(stream.getvalue())
    return str(folder / name)


OURS = {"deepseek2-16b": "deepseek-v2-lite", "deepseek3-671b": "deepseek-v3", "kimi-k2-1t": "kimi-k2",
        "gpt-oss-20b": "gpt-oss-20b"}  # fmt: skip
"""The catalogue's names where MaxText has others."""
BEHIND = {"deepseek3-671b": " n_routing_groups=8 topk_routing_group=4"}  # to be given so, says MaxText's file


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_own_models_are_those_of_the_catalogue(name, tmp_path):
    run, _ = imported(written(tmp_path, PUBLISHED[name], f"{name}.yml") + BEHIND.get(name, ""))
    known = catalog.model(OURS.get(name, name))
    assert run.model.rope.scaling is known.rope.scaling
    if name in OURS:
        assert run.model.rope == known.rope
        assert run.model.family == known.family
    assert run.model.attention == known.attention
    assert run.model.experts == known.experts
    for key in ("hidden", "num_layers", "vocab", "ffn_hidden", "tied_embeddings", "norm_epsilon"):
        if (name, key) != ("mixtral-8x22b", "vocab"):  # the catalogue has its first version, MaxText its third
            assert getattr(run.model, key) == getattr(known, key), key
    assert contract.check(run) == ()


@pytest.mark.parametrize("block", ["llama2", "mixtral"])
def test_shared_experts_concern_blocks_that_have_them(block, tmp_path):
    """Older files have 1 of them for every block; layers/moe.py builds them for DeepSeek and Llama 4."""
    mixture = {"decoder_block": block, "num_experts": 8 if block == "mixtral" else 1, "megablox": False, "steps": 10}
    run, notes = imported(written(tmp_path, mixture | {"shared_experts": 1}))
    assert (run.model, notes) == (imported(written(tmp_path, mixture))[0].model, ())


def test_its_own_models_are_read_by_name_or_the_part_is_named(tmp_path):
    """Its environment is not asked; `model_name` decides as a file of the name does."""
    read, reasons = {}, []
    for name in own_models():
        source = written(tmp_path, {"model_name": name, "steps": 10})
        try:
            read[name] = imported(source)[0].model.num_layers
        except InputError as error:
            reasons.append(str(error))
    assert read.keys() > PUBLISHED.keys()
    assert all(read[name] == values["base_num_decoder_layers"] for name, values in PUBLISHED.items())
    assert all(re.search("not supported|is supported only", reason) for reason in reasons), reasons


def test_the_models_are_those_that_it_publishes():
    python = environment.find()
    if python is None:
        pytest.skip(f"the environment of MaxText was not made: {environment.COMMAND}")
    (folder,) = python.parent.parent.glob("lib/python*/site-packages/maxtext/configs/models")
    for name, values in own_models().items():
        assert YAML(typ="safe").load((folder / f"{name}.yml").read_text()) == values
    for path in folder.parent.glob("gpu/models/llama*.yml"):  # these name a model
        run, _ = imported(str(path), cluster="h100-8x8")
        assert run.model.family == "LlamaForCausalLM"


TOY = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 8, vocab: 512, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 256}
batch: {global_sequences: 64, micro: 2}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 3}
cluster: h100-8x1
engine: maxtext
parallel: {data_shard: 8, sharding: parameters, recompute: full}
train: {steps: 17, seed: 7, checkpoint: {folder: saved, every_steps: 5, keep: 3}}
"""

LATENT = """model={name: toy, family: DeepseekV3ForCausalLM, hidden: 64, num_layers: 3, vocab: 512, ffn_hidden: 96,
norm_epsilon: 1.0e-6,
attention: {kind: mla, num_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 16, rope_head_dim: 8},
experts: {num_experts: 8, top_k: 2, ffn_hidden: 32, num_shared: 2, num_dense_layers: 1, router: sigmoid,
 routed_scale: 2.5}}"""
GPT_OSS = """model={name: toy, family: GptOssForCausalLM, activation: clamped_swiglu,
hidden: 64, num_layers: 4, vocab: 512,
attention: {num_heads: 4, num_kv_heads: 2, bias: true, window: 32, window_pattern: [true, false], sinks: true},
experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true},
rope: {scaling: yarn, factor: 4, original_context: 128, truncate: false}}"""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.schedule=wsd", "optimizer.gradient_clip=null", "precision=fp32", "optimizer.decay_shape=cosine"],
        ["optimizer.schedule=linear", "train.checkpoint=null"],
        ["optimizer.schedule=constant", "optimizer.warmup_steps=0"],
        ["model.rope={theta: 500000, scaling: llama3, factor: 8, original_context: 8192}"],
        ["model.tied_embeddings=true", "model.attention.qk_norm=true", "model.family=Qwen3ForCausalLM"],
        ["parallel={data_shard: 2, data_replicate: 2, tensor: 2, sharding: parameters, recompute: full}"],
        ["parallel={data_shard: 4, tensor: 2, sequence_parallel: false, sharding: none, recompute: full}"],
        ["parallel={data_shard: 8, sharding: optimizer, recompute: {modules: [norm, activation]}}"],
        ["parallel={data_shard: 4, context: 2, sharding: parameters, recompute: full}"],
        ["parallel={data_shard: 2, pipeline: 4, virtual_pipeline: 2, schedule: interleaved, sharding: parameters,"
         " recompute: {modules: [core_attention, norm, activation]}}"],
        ["parallel={data_shard: 4, pipeline: 2, schedule: gpipe, sharding: none, recompute: full}"],
        ["model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "model.family=MixtralForCausalLM",
         "parallel={data_shard: 8, expert: 4, sharding: parameters, recompute: {modules: [norm, activation, moe]}}"],
        ["model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "model.family=MixtralForCausalLM",
         "parallel={data_shard: 4, tensor: 2, sequence_parallel: false, expert: 2, expert_tensor: 2,"
         " sharding: parameters, recompute: full}"],
        ["model.rope={theta: 500000, scaling: yarn, factor: 4, original_context: 128}"],
        [LATENT, "model.rope={scaling: yarn, factor: 4, original_context: 128, beta_fast: 16, mscale: 0.5,"
         " mscale_all_dims: 0.5, truncate: false}"],
        [LATENT, "model.experts.num_groups=4", "model.experts.groups_per_token=2", "train.balance_bias_rate=0.01"],
        [LATENT, "model.family=DeepseekV2ForCausalLM", "model.attention.query_lora_rank=24",
         "model.experts.router=softmax", "model.experts.normalize_top_k=false", "model.experts.num_dense_layers=0",
         "model.ffn_hidden=0"],
        [GPT_OSS],
        ["task=lora", "lora={rank: 4, alpha: 8, targets: [query, down]}"],
        ["data.validation=v.txt", "train.evaluate={every_steps: 5, num_batches: 2, target_loss: 1.5}"],
    ],
    ids=["plain", "wsd", "linear", "constant", "llama3.1", "qwen3", "hybrid", "tensor", "zero1", "context",
         "interleaved", "gpipe", "experts", "experts-tensor", "yarn", "deepseek3-yarn", "deepseek3-groups",
         "deepseek2", "gpt-oss", "adapters", "evaluation"],
)  # fmt: skip
def test_our_exports_come_back(overrides, tmp_path):
    run = runfile.loads(TOY, overrides=overrides)
    folder = Path("out")
    launch = contract.lower(run, folder=folder)
    write_files(launch, tmp_path)
    again, notes = imported(str(tmp_path / "maxtext.yml"))
    assert notes == ()
    assert again.plan == run.plan
    assert configuration(again, again.plan, folder=folder) == configuration(run, run.plan, folder=folder)
    assert again.model.family == run.model.family


def test_settings_behind_a_file_and_its_defaults(tmp_path):
    path = written(tmp_path, {"base_config": "base.yml", "decoder_block": "llama2", "hardware": "gpu"})
    run, notes = imported(f"{path} per_device_batch_size=2 ici_tensor_parallelism=2 steps=50 remat_policy=minimal")
    assert notes == ()
    assert run.plan.describe() == "TP2 FSDP4 mbs4 recompute=core_attention+norm+activation"
    assert (run.global_batch, run.sequence_length, run.num_steps) == (16, 2048, 50)
    assert (run.optimizer.learning_rate, run.optimizer.warmup_steps) == (3e-5, 5)
    assert run.train.checkpoint.every_steps == 10_000


def test_slices_multiply_and_a_file_stands_on_another(tmp_path):
    written(tmp_path, {"steps": 10, "per_device_batch_size": 4}, "parent.yml")
    values = {"base_config": "parent.yml", "dcn_data_parallelism": 2, "ici_fsdp_parallelism": 8, "steps": 20}
    run, _ = imported(written(tmp_path, values), cluster="h100-8x2")
    assert (run.plan.data_replicate, run.plan.data_shard) == (2, 8)
    assert (run.num_steps, run.micro_batch) == (20, 4)


def test_adapters_of_its_usual_modules_on_a_quantised_base(tmp_path):
    lora = {"enable_lora": True, "lora_rank": 8, "lora_alpha": 16.0, "lora_weight_qtype": "nf4", "lora_tile_size": 32}
    run, notes = imported(written(tmp_path, {"lora": lora, "steps": 10, "weight_dtype": "bfloat16"}))
    assert run.lora.targets == ("query", "key", "value", "output", "gate", "up", "down")
    assert (run.lora.rank, run.lora.alpha, run.lora.base_format) == (8, 16.0, "nf4")
    assert not [note for note in notes if "weight_dtype" in note]
    others = lora | {"lora_module_path": ".*/(query|value)", "lora_weight_qtype": "int4", "lora_restore_path": "a"}
    run, notes = imported(written(tmp_path, {"lora": others, "steps": 10}))
    assert run.lora.targets == ("query", "value")
    assert [note.partition(" =")[0] for note in notes if note.startswith("lora")] == [
        "lora_weight_qtype",
        "lora_restore_path",
    ]


def test_what_is_not_carried_is_noted(tmp_path):
    values = {"remat_policy": "custom", "mlpwo": "device", "out_proj": "device", "steps": 50,
              "learning_rate_schedule_steps": 100, "dataset_type": "tfds",
              "load_balance_loss_weight": 0.01}  # fmt: skip
    _, notes = imported(written(tmp_path, values))
    for words in (
        "mlpwo, out_proj are kept", "learning_rate_schedule_steps = 100", "dataset_type = 'tfds'",
        "load_balance_loss_weight = 0.01",
    ):  # fmt: skip
        assert any(note.startswith(words) for note in notes), (words, notes)


DEEPSEEK = PUBLISHED["deepseek2-16b"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"decoder_block": "gemma4_small"}, "decoder block"),
        ({"lora": {"enable_lora": True, "lora_module_path": "encoder/.*"}}, "adapters of modules that"),
        ({"opt_type": "muon"}, "optimizer"),
        ({"quantization": "int8"}, "precision"),
        ({"rope_type": "ntk"}, "RoPE scaling"),
        ({"attention_type": "mla"}, "attention_type"),
        ({"decoder_block": "deepseek"}, "RoPE scaling"),
        ({"decoder_block": "deepseek", "rope_type": "yarn"}, "latent attention is supported only with experts"),
        (DEEPSEEK | {"routed_bias": True}, "latent attention is supported only with experts"),
        (DEEPSEEK | {"mscale": 0.0}, "YARN without a temperature"),
        (DEEPSEEK | {"use_indexer": True}, "indexer needs query_lora_rank"),
        (PUBLISHED["gpt-oss-20b"] | {"attention_sink": False}, "attention_sink"),
        (PUBLISHED["gpt-oss-20b"] | {"num_experts": 1}, "gpt_oss is supported only with experts"),
        ({"ici_sequence_parallelism": 2}, "axis"),
        ({"ici_fsdp_parallelism": 4}, "do not fill the 8 devices"),
        ({"ici_data_parallelism": -1}, "only one axis can be -1"),
        ({"per_device_batch_size": 0.3}, "cannot be split over"),
        ({"ici_pipeline_parallelism": 3}, "do not fill"),
        ({"ici_pipeline_parallelism": 2, "base_num_decoder_layers": 7}, "are not the model's 7 layers"),
    ],
)
def test_what_no_run_file_can_say_is_refused(values, words, tmp_path):
    with pytest.raises(InputError, match=words):
        imported(written(tmp_path, values))


def test_a_model_by_a_name_that_maxtext_lacks(tmp_path):
    with pytest.raises(InputError, match=r"has no model of this name: got 'llama9-1b'"):
        imported(written(tmp_path, {"model_name": "llama9-1b"}))


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        imported(str(tmp_path / "absent.yml"))
    (tmp_path / "list.yml").write_text("- 1\n")
    with pytest.raises(InputError, match="is not a configuration"):
        imported(str(tmp_path / "list.yml"))
    with pytest.raises(InputError, match="key=value"):
        imported(f"{written(tmp_path, {'steps': 3})} steps")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"setps": 3}, "MaxText 0.2.5 has no such key: got 'setps'"),
        ({"setps": 3, "enable_nnnx": True}, "no such key: got 'setps, enable_nnnx'"),
        ({"steps": "many"}, "steps is not a whole number: got 'many'"),
        ({"steps": 10.5}, "steps is not a whole number: got 10.5"),
        ({"learning_rate": True}, "learning_rate is not a number: got True"),
        ({"shard_optimizer_over_data": "yes"}, "shard_optimizer_over_data is not a boolean: got 'yes'"),
        ({"ici_fsdp_parallelism": 0}, "ici_fsdp_parallelism is not a count: got 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is not a count: got 0"),
        ({"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 0}, "num_pipeline_microbatches is not a count"),
        ({"steps": -1}, "neither steps nor learning_rate_schedule_steps"),
        ({"final_logits_soft_cap": 30.0}, "not supported: final_logits_soft_cap"),
        ({"use_dpo": True}, "not supported: use_dpo"),
        ({"mlp_activations": "silu"}, "mlp_activations is not a list: got 'silu'"),
    ],
)  # fmt: skip
def test_what_maxtext_would_not_take_is_refused_with_its_key(values, message, tmp_path):
    with pytest.raises(InputError, match=message):
        imported(written(tmp_path, values))


def test_configurations_that_stand_on_each_other(tmp_path):
    written(tmp_path, {"base_config": "second.yml"}, "first.yml")
    with pytest.raises(InputError, match="configurations are based on each other"):
        imported(written(tmp_path, {"base_config": "first.yml"}, "second.yml"))


def test_only_what_differs_from_its_defaults_is_noted(tmp_path):
    usual = {
        "capacity_factor": -1,
        "cast_logits_to_fp32": True,
        "quantization": None,
        "enable_dropout": False,
        "dropout_rate": 0.1,
    }
    assert imported(written(tmp_path, usual | {"steps": 1.0e2}))[1] == ()
    others = {"capacity_factor": 1.25, "sparse_matmul": False, "adamw_mask": ["bias"]}
    assert [note.partition(" ")[0] for note in imported(written(tmp_path, others))[1]] == list(others)


QKV = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")


@pytest.mark.parametrize(
    ("values", "modules", "share"),
    [
        ({"remat_policy": "full"}, None, None),
        ({"remat_policy": "save_qkv_proj"}, ["core_attention", "norm", "activation", "mlp"], None),
        ({"remat_policy": "custom", "decoder_layer_input": "offload"}, None, 1.0),
        ({"remat_policy": "custom", "decoder_layer_input": "offload", **QKV},
         ["core_attention", "norm", "activation", "mlp"], 1.0),
        ({"remat_policy": "custom", "context": "device", "mlpwi_0": "device", "mlpwi_1": "device", **QKV},
         ["norm", "activation"], 0.1),
        ({"remat_policy": "qkv_proj_offloaded"}, ["core_attention", "norm", "activation", "mlp"], 0.6),
    ],
)  # fmt: skip
def test_policies_are_modules_and_a_share_in_host_memory(tmp_path, values, modules, share):
    """Heads of 2,048 elements, keys and values of 1,024 in all, an input of 2,048, and products of 14,336 each."""
    shape = {"base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 4, "head_dim": 128,
             "base_mlp_dim": 14336, "steps": 10}  # fmt: skip
    run, notes = imported(written(tmp_path, shape | values))
    assert run.plan is not None
    assert set(run.plan.recompute_modules) == set(modules or ())
    assert run.stack.features.offloaded_activations == (share and pytest.approx(share, abs=0.03))
    assert not [note for note in notes if any(key in note for key in values)]


def test_weights_in_bf16_have_no_masters_and_half_the_states(tmp_path):
    run, notes = imported(written(tmp_path, {"weight_dtype": "bfloat16", "steps": 10}))
    assert not run.optimizer.master_weights
    assert not [note for note in notes if "weight_dtype" in note]
    precision = run.precision
    assert precision.weight_bytes + precision.grad_bytes + precision.master_bytes == 4
    assert precision.optimizer_state_bytes == 4


@pytest.mark.parametrize(("tiles", "chunk"), [(1, "auto"), (4, 1024)])
def test_tiles_of_the_loss_are_chunks(tmp_path, tiles, chunk):
    values = {"num_vocab_tiling": tiles, "per_device_batch_size": 2, "max_target_length": 2048, "steps": 10}
    run, notes = imported(written(tmp_path, values | {"ici_fsdp_parallelism": -1}))
    assert run.kernels.loss_chunk == chunk
    assert not [note for note in notes if "tiling" in note]


VALUES = {"attention_tile": (256, 512, 1024)}
IMPOSSIBLE = ("does not run on",)
CLUSTERS = ("h100-8x1", "b200-8x1", "tpu-v5p-4x2")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_stack_of_an_export_is_that_of_its_run(tmp_path_factory, data):
    cluster = data.draw(st.sampled_from(CLUSTERS), label="cluster")
    kinds = {name: VALUES.get(name, allowed) for name, allowed in FACTS.switches}
    switches = {name: data.draw(st.sampled_from([None, *kinds[name]]), label=name) for name in kinds}
    stated = {name: value for name, value in switches.items() if value is not None}
    try:
        run = runfile.loads(TOY, overrides=[f"cluster={cluster}", f"stack={json.dumps(stated)}"])
    except RunFileError as error:
        assume(not any(words in str(error) for words in IMPOSSIBLE))
        raise
    folder = tmp_path_factory.mktemp("export")
    write_files(contract.lower(run, folder=Path("out")), folder)
    again, notes = imported(str(folder / "maxtext.yml"), cluster)
    is_tpu = cluster.startswith("tpu")
    kernel = AttentionKernel.SPLASH if is_tpu else AttentionKernel.CUDNN
    own = Features(attention=kernel, gradient_format=WireFormat.FP32)
    of_splash = Features(attention_tile=512, fuses_attention_backward=False)
    wanted = run.stack.features.or_else(own)  # what the file has no setting for is in its line
    if wanted.attention is AttentionKernel.SPLASH:
        wanted = wanted.or_else(of_splash)
    assert again.stack.features == wanted
    assert all("sa_use_fused_bwd_kernel" in note for note in notes)


@pytest.mark.parametrize(
    ("values", "cluster", "stack", "words"),
    [
        ({}, "h100-8x1", {"attention": "triton"}, ""),
        ({"attention": "flash"}, "h100-8x1", {"attention": "triton"}, ""),
        ({"attention": "cudnn_flash_te"}, "h100-8x1", {"attention": "cudnn"}, ""),
        ({"attention": "cudnn_flash_te"}, "mi300x-8x1", {"attention": "ck"}, ""),
        ({"attention": "dot_product"}, "h100-8x1", {"attention": "unfused"}, ""),
        ({"attention": "paged"}, "h100-8x1", {}, "attention = 'paged' on h100; the estimate assumes the kernel"),
        ({"attention": "cudnn_flash_jax"}, "tpu-v5p-4x2", {}, "attention = 'cudnn_flash_jax' on tpu-v5p"),
        ({"grad_dtype": "bfloat16"}, "h100-8x1", {"attention": "triton", "gradient_format": "bf16"}, ""),
        ({"sa_block_q": 1024}, "tpu-v5p-4x2",
         {"attention": "splash", "attention_tile": 1024, "fuses_attention_backward": False}, "sa_block_kv = 512"),
        ({"sa_use_fused_bwd_kernel": True}, "tpu-v5p-4x2",
         {"attention": "splash", "attention_tile": 512, "fuses_attention_backward": True}, ""),
    ],
)  # fmt: skip
def test_switches_are_read_or_noted(values, cluster, stack, words, tmp_path):
    found = contract.import_run(written(tmp_path, values), cluster=cluster)
    assert found.content["stack"] == {"gradient_format": "fp32"} | stack
    assert words in "".join(found.notes)
    assert bool(words) == bool(found.notes)


def test_names_of_the_catalogue_older_keys_and_the_z_loss(tmp_path):
    values = PUBLISHED["llama3.1-70b"] | {"cosine_learning_rate_final_fraction": 0.25, "z_loss_multiplier": 1e-4}
    found = contract.import_run(written(tmp_path, values, "llama3.1-70b.yml"), cluster="h100-8x1")
    assert found.content["model"] == "llama3.1-70b"
    assert found.content["optimizer"]["final_ratio"] == 0.25
    assert found.content["train"]["z_loss"] == 1e-4


def test_its_keys_are_those_of_its_environment():
    python = environment.find()
    if python is None:
        pytest.skip(f"the environment of MaxText was not made: {environment.COMMAND}")
    (path,) = python.parent.parent.glob("lib/python*/site-packages/maxtext/configs/base.yml")
    known = known_keys()
    for key, value in YAML(typ="safe").load(path.read_text()).items():
        assert known[key] == (None if str(value).startswith("/") else value), key


def test_two_devices_of_jax_are_one_chip(tmp_path):
    """JAX shows two devices for each TPU7x chip; plans and catalogue count chips."""
    given = {"model_name": "default", "base_num_decoder_layers": 4, "per_device_batch_size": 2, "steps": 10,
             "vocab_size": 512, "lr_schedule_type": "cosine", "attention": "autoselected"}  # fmt: skip
    run, notes = imported(written(tmp_path, given), "tpu7x-4x4")
    assert (run.plan.data, run.plan.num_devices, run.global_batch, run.micro_batch) == (16, 16, 64, 4)
    assert any("the 2 devices that JAX shows for each tpu7x: 32 are 16 here" in note for note in notes)
    again = configuration(run, run.plan, folder=tmp_path)
    assert (again["ici_fsdp_parallelism"], again["per_device_batch_size"]) == (32, 2)
    with pytest.raises(InputError, match="JAX shows 2 devices for each tpu7x"):
        imported(written(tmp_path, given | {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 32}), "tpu7x-4x4")
    odd = runfile.loads(
        "model: llama3.1-8b\ndata: {sequence_length: 128}\nbatch: {global_sequences: 16, micro: 1}\n"
        "cluster: tpu7x-4x4\nengine: maxtext\nparallel: {data_shard: 16, sharding: parameters, recompute: full}\n"
        "optimizer: {learning_rate: 1.0e-3}\ntrain: {steps: 3}\n"
    )
    (problem,) = [one for one in contract.check(odd) if one.key == "batch.micro"]
    assert problem.hint == "--set batch.micro=2"


@pytest.mark.parametrize(
    ("scale", "hidden", "heads", "ffn", "layers"),
    [(2, 2048, 32, 14336, 16), (4, 4096, 32, 14336, 16), (8, 4096, 32, 14336, 32), (64, 8192, 64, 28672, 64)],
)
def test_sizes_are_scaled_as_maxtext_scales_them(scale, hidden, heads, ffn, layers, tmp_path):
    run, _ = imported(written(tmp_path, {"global_parameter_scale": scale, "steps": 10}))
    assert (run.model.hidden, run.model.attention.num_heads) == (hidden, heads)
    assert (run.model.ffn_hidden, run.model.num_layers) == (ffn, layers)


def test_a_scale_that_is_no_power_of_two_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a power of two: got 3"):
        imported(written(tmp_path, {"global_parameter_scale": 3}))


def test_replicas_over_slices_are_counted_by_the_degrees_within_one(tmp_path):
    values = {"steps": 10, "ici_fsdp_parallelism": 8, "dcn_data_parallelism": -1}
    run, _ = imported(written(tmp_path, values), cluster="h100-8x4")
    assert (run.plan.data_shard, run.plan.data_replicate) == (8, 4)


def test_rotated_pairs_are_planned_and_not_trained(tmp_path):
    yarn = {"rope_type": "yarn", "steps": 10}
    for pairs in (True, False):
        run, _ = imported(written(tmp_path, yarn | {"rope_interleave": pairs}))
        assert run.model.unsupported == ("rotations of neighbouring dimensions",) * pairs
        assert run.model.rope.scaling is RopeScaling.YARN


@pytest.mark.parametrize(("tokens", "scaling", "mscale"), [(4096, "none", 0.0), (8192, "yarn", 0.707)])
def test_yarn_of_earlier_versions_scales_only_longer_sequences_than_the_original(tmp_path, tokens, scaling, mscale):
    """MaxText/layers/embeddings.py and attentions.py before `max_position_embeddings`; YARN has its own base."""
    later = {"max_position_embeddings", "original_max_position_embeddings", "rope_max_timescale"}
    values = {key: value for key, value in DEEPSEEK.items() if key not in later}
    earlier = {"original_seq_len": 4096, "rope_theta": 20000.0, "max_target_length": tokens, "steps": 10}
    rope = imported(written(tmp_path, values | earlier))[0].model.rope
    assert (rope.scaling.value, rope.theta, rope.mscale_all_dims) == (scaling, 20000.0, mscale)
    assert rope.original_context == (4096 if mscale else 0)


def test_yarn_of_earlier_versions_has_no_temperature_beside_plain_attention(tmp_path):
    earlier = {"rope_type": "yarn", "original_seq_len": 2048, "max_target_length": 4096}
    with pytest.raises(InputError, match="YARN without a temperature"):
        imported(written(tmp_path, earlier))


def test_forced_balance_of_rocm_is_noted_where_it_is_on(tmp_path):
    for forces in (True, False):
        _, notes = imported(written(tmp_path, {"steps": 10, "expert_balance": forces}))
        assert ("expert_balance = True is not carried over" in notes) is forces


def test_keys_of_other_versions_are_known(tmp_path):
    _, notes = imported(written(tmp_path, {"steps": 10, "enable_nnx": False, "tile_batch_seq": 512}))
    assert not notes
    _, notes = imported(written(tmp_path, {"steps": 10, "tile_batch_seq": 256}))
    assert notes == ("the estimate does not include: tile_batch_seq = 256",)
    with pytest.raises(InputError, match="no such key: got 'my_key'"):
        imported(written(tmp_path, {"steps": 10, "my_key": 1}))


def test_an_own_base_need_not_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, _ = imported("base.yml steps=10")
    assert (run.model.hidden, run.num_steps) == (2048, 10)


def test_a_model_overrides_the_base_and_settings_override_it(tmp_path):
    written(tmp_path, {"base_emb_dim": 2048, "base_mlp_dim": 7168, "steps": 5, "model_name": "default"}, "base.yml")
    (tmp_path / "models").mkdir()
    written(tmp_path / "models", {"base_emb_dim": 1024, "base_mlp_dim": 3072}, "mine.yml")
    run, _ = imported(f"{tmp_path}/base.yml model_name=mine")
    assert (run.model.hidden, run.model.ffn_hidden, run.num_steps) == (1024, 3072, 5)
    run, _ = imported(written(tmp_path, {"base_config": "base.yml", "model_name": "mine", "base_mlp_dim": 4096}))
    assert (run.model.hidden, run.model.ffn_hidden, run.num_steps) == (1024, 4096, 5)
