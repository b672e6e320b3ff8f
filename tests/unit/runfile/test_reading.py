"""A run file becomes a Run, or an error names its fault."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.errors import MeshwrightError, RunFileError
from meshwright.specs.model import Rope, RopeScaling
from meshwright.specs.plan import Recompute, Schedule, Sharding
from meshwright.specs.run import LearningRateSchedule, Task

LLAMA = """\
model: llama3.1-8b
task: pretrain
data: {source: synthetic, sequence_length: 8192}
batch: {global_tokens: 4_194_304, micro: auto}
optimizer:
  learning_rate: 1e-4
  schedule: wsd
  warmup_steps: 0x10
precision: bf16
cluster: h100-8x8
parallel: auto
engine: torchtitan
train: {tokens: 15e12}
"""
EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "runs").glob("*.yaml"))


def error_of(*overrides: str, text: str = LLAMA) -> str:
    with pytest.raises(RunFileError) as caught:
        runfile.loads(text, file="run.yaml", overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def without(key: str) -> str:
    return "".join(line for line in LLAMA.splitlines(keepends=True) if not line.startswith(key))


def test_a_whole_run() -> None:
    run = runfile.loads(LLAMA, file="dir/my-run.yaml")
    assert run.name == "my-run"
    assert run.model == catalog.model("llama3.1-8b")
    assert run.cluster == catalog.cluster("h100-8x8")
    assert run.task is Task.PRETRAIN
    assert run.engine == "torchtitan"
    assert run.stack.framework == "torchtitan"
    assert (run.sequence_length, run.global_batch, run.micro_batch) == (8192, 512, None)
    assert run.tokens_per_step == 4_194_304
    assert run.num_steps == 3_576_279  # 15e12 / 4194304 = 3576278.7
    assert run.optimizer.learning_rate == 1e-4
    assert run.optimizer.warmup_steps == 16
    assert run.optimizer.schedule is LearningRateSchedule.WSD
    assert run.plan is None
    assert run.lora is None


def test_four_keys_are_enough() -> None:
    run = runfile.loads(
        "model: llama3.1-8b\ndata: {sequence_length: 128}\nbatch: {global_sequences: 8}\ncluster: h100-8x1\n"
    )
    assert (run.global_batch, run.precision.name, run.engine) == (8, "bf16", "native")
    assert run.num_steps is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_load(path: Path) -> None:
    run = runfile.load(path)
    assert run.source == str(path)
    assert run.name == path.stem
    if run.plan is not None and run.cluster is not None:
        assert run.plan.num_devices == run.cluster.num_devices


def test_there_are_examples_of_each_kind() -> None:
    runs = [runfile.load(path) for path in EXAMPLES]
    assert {run.task for run in runs} == set(Task)
    assert any(run.plan for run in runs)
    assert any(run.plan is None for run in runs)


def test_every_error_is_told_at_once_and_in_order() -> None:
    text = LLAMA.replace("model:", "modle:").replace("wsd", "cosin").replace("torchtitan", "3")
    assert error_of("train.seed=-1", text=text) == (
        "run.yaml: 4 errors\n"
        "  run.yaml:1: modle: unknown key; hint: did you mean 'model'?\n"
        "  run.yaml:7: optimizer.schedule: unknown value: got 'cosin', allowed: cosine, linear, wsd, constant, "
        "cosine_with_restarts, polynomial, inverse_sqrt; hint: did you mean 'cosine'?\n"
        "  run.yaml:12: engine: unknown value: got 3, allowed: maxtext, megatron, native, torchtitan, trl, any\n"
        "  --set train.seed: is out of range: got -1, allowed: >= 0"
    )


def test_a_long_list_of_errors_is_cut() -> None:
    text = LLAMA + "".join(f"zzz{i}: 1\n" for i in range(40))
    lines = error_of(text=text).splitlines()
    assert lines[0] == "run.yaml: 40 errors"
    assert lines[-1] == "  and 30 more"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("batch.mbs", "batch.micro"),
        ("batch.tp", "parallel.tensor"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("sequence_length", "data.sequence_length"),
        ("train.evaluat", "evaluate"),
        ("train.checkpoint.foldr", "folder"),
    ],
)
def test_an_unknown_key_is_told_the_known_one(key: str, hint: str) -> None:
    message = error_of(f"{key}=1")
    assert f"--set {key}: unknown key" in message
    assert hint in message


def test_a_named_model_takes_other_shapes() -> None:
    overrides = ["model.num_layers=2", "model.attention.num_heads=16", "model.rope.theta=7"]
    run = runfile.loads(LLAMA, overrides=overrides)
    named = runfile.loads(LLAMA).model
    attention = replace(named.attention, num_heads=16)
    shapes = {"num_layers": 2, "attention": attention, "rope": replace(named.rope, theta=7.0)}
    assert run.model == replace(named, name=f"{named.name}-variant", **shapes)
    again = runfile.loads(runfile.changed_text(run, {}, wanted=run, what="the model"))
    assert again.model == run.model
    assert runfile.loads(LLAMA, overrides=["model.num_layers=2", "model.name=mine"]).model.name == "mine"


def test_a_share_of_warm_up_becomes_steps_rounded_up() -> None:
    share = "optimizer={schedule: linear, warmup_ratio: 0.03}"
    steps = runfile.loads(LLAMA.replace("tokens: 15e12", "steps: 101"), overrides=[share])
    assert steps.optimizer.warmup_steps == 4
    by_tokens = runfile.loads(LLAMA, overrides=[share])
    assert by_tokens.num_steps is not None
    assert by_tokens.optimizer.warmup_steps == math.ceil(0.03 * by_tokens.num_steps)
    endless = runfile.loads(LLAMA.replace("tokens: 15e12", "seed: 5"), overrides=[share])
    assert (endless.optimizer.warmup_steps, endless.optimizer.warmup_ratio) == (0, 0.03)


def test_a_changed_model_keeps_all_else() -> None:
    def check(name: str) -> None:
        named = catalog.model(name)
        run = runfile.loads(LLAMA, overrides=[f"model={name}", f"model.norm_epsilon={named.norm_epsilon}"])
        assert replace(run.model, name=name) == replace(named, name=name)

    check_every(catalog.model_names(), check)


def test_what_is_wrong_is_said() -> None:
    def check(override: str, words: str) -> None:
        assert words in error_of(override)

    check_every(
        [
            ("train.steps='10'", "must be a whole number: got '10'\nhint: write the number without quotes"),
            ("train.seed=1.5", "must be a whole number: got 1.5"),
            ("train.seed=true", "must be a whole number: got true"),
            ("train.steps=0", "is out of range: got 0, allowed: > 0"),
            ("train.seed=2e18", "allowed: <= 1,000,000,000"),
            ("optimizer.learning_rate='1e-4'", "must be a number: got '1e-4'"),
            ("optimizer.learning_rate=-1", "allowed: > 0"),
            ("optimizer={schedule: cosine, cycles: 2}", "cycles: is no setting of the schedule cosine"),
            ("optimizer={schedule: linear, decay_ratio: 0.2}", "only wsd has it"),
            ("optimizer={warmup_steps: 2, warmup_ratio: 0.1}", "and optimizer.warmup_steps are both given"),
            ("optimizer.betas=[0.9]", "optimizer.betas: has too few values"),
            ("optimizer.betas=[0.9, 1]", "allowed: < 1"),
            ("optimizer.betas=0.9", "must be a list: got 0.9"),
            ("precision=8", "must be text: got 8\nhint: put it in quotes"),
            ("precision=fp9", "unknown precision: got 'fp9'\nhint: did you mean 'fp8'?"),
            ("model=lama3.1-8b", "unknown model: got 'lama3.1-8b'\nhint: did you mean 'llama3.1-8b'?"),
            ("model=./meta-llama/Llama-3.1-8B", "no such file"),
            ("cluster=h10-8x8", "unknown accelerator"),
            ("cluster=h100", "--set cluster"),
            ("cluster=h100-8x99999999", "more devices than can be planned"),
            ("cluster={accelerator: h100, devices_per_node: 8}", "cluster.num_nodes: is missing"),
            ("cluster={accelerator: h10, devices_per_node: 8, num_nodes: 1}", "unknown accelerator: got 'h10'"),
            ("precision=nvfp4", "h100 does not multiply fp4"),
            ("cluster=v100-8x8", "v100 does not multiply bf16: got 'bf16', allowed: fp16, fp32"),
            ("data=", "data: is empty"),
            ("data=3", "must be a mapping of keys: got 3"),
            ("parallel=atuo", "got 'atuo', allowed: auto or a mapping\nhint: did you mean 'auto'?"),
            ("parallel.tensor=2", "parallel is not a mapping here"),
            ("precision.matmul=fp8", "precision is not a mapping here: got 'bf16'"),
            ("model.num_layer=4", "model.num_layer: unknown key\nhint: did you mean 'num_layers'?"),
            ("model.base=", "model.base: is empty"),
            ("model.num_layers=0", "model.num_layers: is out of range: got 0"),
            ("model.experts={top_k: 2}", "model.experts.num_experts: is missing"),
            ("model.attention.num_windowed_layers=33", "model.attention.num_windowed_layers: is more than num_layers"),
            ("model.num_mtp_layers=17", "model.num_mtp_layers: is out of range: got 17"),
            ("parallel={sequence_parallel: yes}", "must be true or false: got 'yes'\nhint: write true"),
            ("batch.micro=many", "allowed: auto or a whole number"),
            ("batch.micro=3", "does not divide the global batch of 512 sequences"),
            ("batch.global_sequences=4", "the global batch is given twice"),
            ("batch={}", "the global batch is missing"),
            ("batch.global_tokens=4194305", "is not a multiple of the sequence length 8192"),
            ("train.steps=5", "both steps and tokens are given"),
            ("lora={rank: 4}", "write `task: lora`"),
            ("lora={ranks: {dwn: 4}}", "a target or LAYER.TARGET"),
            ("lora={alphas: {one.up: 4}}", "a target or LAYER.TARGET"),
            ("lora={layers: []}", "lora.layers"),
            (
                "stack.framework=torchtitn",
                "stack.framework: unknown stack: got 'torchtitn'\nhint: did you mean 'torchtitan'?",
            ),
            (
                "stack={capacity_factor: 2, drops_tokens: false}",
                "stack.capacity_factor: is given, but drops_tokens is false",
            ),
            ('name="a\\tb"', "--set name: must be printable text: got 'a\\\\tb'"),
            ("parallel={recompute: {modules: [atention]}}", "unknown module"),
        ],
        lambda case: check(*case),
    )


@pytest.mark.parametrize(
    ("cluster", "switch", "words"),
    [
        ("h100-8x8", "attention=aiter", "does not run on h100: got 'aiter', allowed: unfused, fa1, fa2, fa3, cudnn"),
        ("b200-8x8", "attention=fa3", "does not run on b200: got 'fa3'"),
        ("mi355x-8x8", "attention=cudnn", "allowed: unfused, fa1, fa2, ck, aiter, triton, flex"),
        ("tpu-v5p-4x16", "attention=fa2", "allowed: unfused, splash, flex"),
        ("mi355x-8x8", "dispatcher=hybridep", "allowed: all-to-all, deepep"),
        ("tpu-v5p-4x16", "dispatcher=deepep", "allowed: all-to-all"),
        ("a100-8x8", "fp8_attention=true", "stack.fp8_attention: a100 does not multiply fp8"),
        ("h100-8x4+b200-8x4", "attention=fa3", "does not run on b200"),
    ],
)
def test_kernels_of_other_accelerators_are_refused(cluster: str, switch: str, words: str) -> None:
    assert words in error_of(f"cluster={cluster}", f"stack.{switch}", "engine=any")


def test_a_missing_key_is_named() -> None:
    assert error_of(text=without("cluster")) == "run.yaml: cluster: is missing"
    assert error_of(text=LLAMA.replace(", sequence_length: 8192", "")) == (
        "run.yaml:3: data.sequence_length: is missing"
    )


def test_fewer_steps_than_warm_up() -> None:
    assert "optimizer.warmup_steps (16)" in error_of("train={steps: 10}")


def test_a_pinned_plan_takes_what_remains_of_the_devices() -> None:
    pinned = "parallel={tensor: 4, pipeline: 2, virtual_pipeline: 2, recompute: selective}"
    plan = runfile.loads(LLAMA, overrides=[pinned, "batch.micro=2"]).plan
    assert plan is not None
    assert (plan.data_shard, plan.num_devices, plan.micro_batch) == (8, 64, 2)
    assert plan.schedule is Schedule.INTERLEAVED
    assert plan.sharding is Sharding.OPTIMIZER
    assert (plan.recompute, plan.recompute_modules) == (Recompute.SELECTIVE, ("core_attention",))


def test_a_pinned_plan_has_one_sequence_per_micro_batch_unless_it_says_more() -> None:
    run = runfile.loads(LLAMA, overrides=["batch={global_sequences: 64}", "parallel={sharding: parameters}"])
    assert run.plan is not None
    assert run.micro_batch == run.plan.micro_batch == 1


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("{tensor: 7}", "multiply to 7, which does not divide the 64 devices"),
        ("{tensor: 4, data_shard: 8}", "multiply to 32 devices, h100-8x8 has 64"),
        ("{expert: 3}", "expert x expert_tensor (3) does not divide the 64 devices"),
        ("{pipeline: 64}", "64 stages for 32 layers"),
        ("{pipeline: 2, layers_per_stage: [16]}", "one value for each of 2 stages"),
        ("{pipeline: 2, layers_per_stage: [16, 17]}", "adds up to 33, llama3.1-8b has 32 layers"),
        ("{recompute: {}}", "either modules or layers"),
        ("{recompute: {modules: [norm], layers: 1}}", "either modules or layers"),
        ("{tensor: 0}", "allowed: > 0"),
        ("{data_shrd: 2}", "--set parallel: parallel.data_shrd: unknown key"),
    ],
)
def test_impossible_plans(parallel: str, words: str) -> None:
    assert words in error_of(f"parallel={parallel}", "batch.micro=1")


def test_a_batch_that_does_not_divide_over_the_replicas() -> None:
    assert "does not divide into portions of 64" in error_of(
        "batch={global_sequences: 96}", "parallel={sharding: none}"
    )


def test_auto_micro_batch_contradicts_a_pinned_plan() -> None:
    assert "is auto, but the plan is pinned" in error_of("parallel={tensor: 8}")


def test_here_is_what_the_caller_measured() -> None:
    text = LLAMA.replace("h100-8x8", "here")
    unknown = runfile.loads(text)
    assert (unknown.cluster, unknown.cluster_name) == (None, "here")
    cluster = catalog.cluster("h100-8x1")
    assert runfile.loads(text, here=cluster).cluster == cluster
    remains = runfile.loads(text, overrides=["parallel={tensor: 2}", "batch.micro=1"])
    assert remains.plan is not None
    assert (remains.plan.tensor, remains.plan.data_shard, remains.is_data_shard_open) == (2, 1, True)
    pinned = ["parallel={data_shard: 4}", "batch.micro=1"]
    assert runfile.loads(text, overrides=pinned).is_data_shard_open is False


def test_inline_cluster() -> None:
    run = runfile.loads(LLAMA, overrides=["cluster={accelerator: h100, devices_per_node: 4, num_nodes: 2}"])
    assert run.cluster is not None
    assert (run.cluster.num_devices, run.cluster_name) == (8, "h100-4x2")


def test_inline_model_fills_in_what_follows() -> None:
    shapes = "{hidden: 512, num_layers: 4, vocab: 1000, ffn_hidden: 2048, attention: {num_heads: 8}}"
    model = runfile.loads(LLAMA, overrides=[f"model={shapes}"]).model
    assert (model.name, model.attention.head_dim, model.attention.num_kv_heads) == ("inline", 64, 8)
    assert model.rope == Rope(theta=10_000.0, scaling=RopeScaling.NONE)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("ffn_hidden: 8, attention: {num_heads: 8, num_kv_heads: 3}", "attention.num_kv_heads: does not divide"),
        ("ffn_hidden: 8, attention: {num_heads: 7}", "attention.head_dim: is missing"),
        ("attention: {num_heads: 8}", "model.ffn_hidden: is missing"),
        (
            "ffn_hidden: 8, attention: {num_heads: 8}, rope: {scaling: yarn, factor: 4.0}",
            "rope.original_context: is missing",
        ),
        ("ffn_hidden: 8, attention: {num_heads: 8, kind: mla}", "kv_lora_rank: is missing"),
        ("ffn_hidden: 8, attention: {num_heads: 8, num_windowed_layers: 5}", "is more than num_layers"),
        (
            "attention: {num_heads: 8}, experts: {num_experts: 4, top_k: 5, ffn_hidden: 8}",
            "experts.top_k: is more than num_experts (4): got 5",
        ),
        (
            "attention: {num_heads: 8}, experts: {num_experts: 4, top_k: 1, ffn_hidden: 8, num_dense_layers: 5}",
            "experts.num_dense_layers: is more than num_layers",
        ),
    ],
)
def test_inline_models_that_cannot_be(shapes: str, words: str) -> None:
    assert words in error_of(f"model={{hidden: 512, num_layers: 4, vocab: 1000, {shapes}}}")


def test_a_hugging_face_configuration(tmp_path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for given in (path, tmp_path):
        run = runfile.loads(LLAMA, overrides=[f"model={given}"])
        assert (run.model.hidden, run.model.num_layers) == (64, 2)
    path.write_text("{")
    with pytest.raises(MeshwrightError):
        runfile.loads(LLAMA, overrides=[f"model={path}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.modules_to_save=[norm]", "lora.modules_to_save"),
        ("lora.layers=[3, 32]", "no layer 32: 0 to 31"),
        ("lora.ranks={up: 4}", "lora.ranks.up: has no adapters"),
        ("lora={layers: [1], alphas: {2.query: 4}}", "lora.alphas.2.query: has no adapters"),
    ],
)
def test_places_without_adapters_are_refused(override: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        runfile.loads(LLAMA, overrides=["task=lora", override])


def test_a_tied_head_is_trained_as_the_embedding() -> None:
    tied = LLAMA.replace("model: llama3.1-8b", "model: llama3.2-1b")
    with pytest.raises(RunFileError, match="modules_to_save: the head of tied embeddings"):
        runfile.loads(tied, overrides=["task=lora", "lora.modules_to_save=[embedding, head]"])


def test_ranks_and_alphas_of_one_layer_are_in_place_of_those_of_the_target() -> None:
    lora = runfile.loads(LLAMA, overrides=["task=lora", "lora={ranks: {query: 4, 3.query: 2}, layers: [3, 1, 3]}"]).lora
    assert lora is not None
    assert lora.layers == (1, 3)
    assert [own and own.rank for own in (lora.at("query", layer=i) for i in (0, 1, 3))] == [None, 4, 2]


def test_lora_has_defaults() -> None:
    lora = runfile.loads(LLAMA, overrides=["task=lora"]).lora
    assert lora is not None
    assert lora.targets == ("query", "key", "value", "output")


OPTIONS = {"model": "llama3.1-8b", "cluster": "h100-8x8", "global_batch": 512, "sequence_length": 8192}


def test_options_are_a_run_file() -> None:
    run = runfile.from_options(**OPTIONS)
    assert (run.name, run.global_batch, run.sequence_length) == ("llama3.1-8b", 512, 8192)
    again = runfile.loads(run.text)
    assert (again.model, again.cluster, again.global_batch) == (run.model, run.cluster, run.global_batch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 0}, "--gbs: is out of range: got 0, allowed: > 0"),
        ({"sequence_length": -1}, "--seq: is out of range"),
        ({"model": "lama3.1-8b"}, "--model: unknown model: got 'lama3.1-8b'"),
        ({"cluster": "h10-8x8"}, "--cluster: unknown accelerator"),
        ({"precision": "fp9"}, "--precision: unknown precision"),
        ({"engine": "deepspeed"}, "--engine: unknown value: got 'deepspeed', allowed: maxtext, megatron"),
    ],
)
def test_errors_name_the_option(change: dict[str, object], words: str) -> None:
    with pytest.raises(RunFileError) as caught:
        runfile.from_options(**(OPTIONS | change))  # pyright: ignore[reportArgumentType]
    assert str(caught.value).startswith(words)


def test_fp16_multiplies_at_its_own_rate_where_there_is_no_bf16() -> None:
    old = runfile.loads(LLAMA, overrides=("precision=fp16", "cluster=v100-8x8"))
    new = runfile.loads(LLAMA, overrides=("precision=fp16", "cluster=h100-8x8"))
    assert (old.precision.matmul, new.precision.matmul) == ("fp16", "bf16")


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        ("num_hidden_layers", 5000, "more layers than can be planned"),
        ("num_hidden_layers", 10**20, "from 1 to 10,000,000"),
        ("hidden_size", 32 * 10**20, "from 1 to 10,000,000"),
    ],
)
def test_a_config_of_impossible_size_is_refused(tmp_path: Path, shape: str, size: int, words: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
        "num_attention_heads": 32, "num_hidden_layers": 32,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {shape: size}))
    assert words in error_of(f"model={path}")


def test_validation_sources_have_names() -> None:
    one = runfile.loads(LLAMA, overrides=["data.validation=a.txt", "train.evaluate={}"])
    assert one.data.validation_sources == {"validation": "a.txt"}
    several = ["data.validation={web: a.txt, code: b}", "train.evaluate={best_by: code}"]
    run = runfile.loads(LLAMA, overrides=several)
    assert dict(run.data.validation_sources) == {"web": "a.txt", "code": "b"}
    assert run.train.evaluate is not None
    assert run.train.evaluate.best_by == "code"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.validation={}"], "data.validation"),
        (["data.validation={mean: a}"], "is not mean"),
        (["data.validation={'a b': a}"], "letters, digits"),
        (["data.validation={a: 7}"], "data.validation.a"),
        (["data.validation=[a]"], "data.validation"),
        (["data.validation={a: x}", "train.evaluate={best_by: b}"], "got 'b', allowed: mean, a"),
        (["train.evaluate={best_by: web}"], "got 'web', allowed: mean, validation"),
    ],
)
def test_validation_sources_that_cannot_be(overrides: list[str], words: str) -> None:
    assert words in error_of(*overrides)


def test_training_sources_have_names_and_weights() -> None:
    given = "data.source={web: {path: a.jsonl, weight: 3}, code: src}"
    run = runfile.loads(LLAMA, overrides=[given, "train.evaluate={best_by: code}"])
    assert run.data.source_text == "code=src*1, web=a.jsonl*3"
    assert run.data.validation_names == ("code", "web")
    assert runfile.loads(LLAMA, overrides=[given, "data.source.web.weight=2.5"]).data.sources["web"].weight == 2.5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.source={}"], "data.source"),
        (["data.source={mean: a}"], "is not mean"),
        (["data.source={a: {weight: 2}}"], "data.source.a.path"),
        (["data.source={a: {path: x, weight: 0}}"], "data.source.a.weight"),
        (["data.source={a: {path: x, weight: -1}}"], "data.source.a.weight"),
        (["data.source={a: {path: x, weight: .inf}}"], "data.source.a.weight"),
        (["data.source={a: {path: x, wieght: 1}}"], "wieght"),
        (["data.source={a: 7}"], "data.source.a"),
        (["data.source=[a]"], "data.source"),
        (["data.source={a: synthetic}"], "random tokens are no part of a mixture"),
        (["data.source={a: x, b: y}", "train.evaluate={best_by: c}"], "got 'c', allowed: mean, a, b"),
    ],
)
def test_training_sources_that_cannot_be(overrides: list[str], words: str) -> None:
    assert words in error_of(*overrides)
