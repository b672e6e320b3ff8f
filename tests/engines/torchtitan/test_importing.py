"""Configurations of torchtitan as run files: its own published ones, and ours there and back.

All are read as text, and compared with the trees that torchtitan builds when it runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from ruamel.yaml import YAML

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: pip install '.[torchtitan]'", allow_module_level=True)

from meshwright import runfile
from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import Imported, find_engine
from meshwright.engines.local import write_files
from meshwright.engines.recognition import recognised
from meshwright.engines.torchtitan.config_text.modules import ProjectModules
from meshwright.engines.torchtitan.config_text.tree import read_tree
from meshwright.engines.torchtitan.config_trees.models import same_model
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.engines.torchtitan.facts import FACTS
from meshwright.errors import InputError
from meshwright.specs.run import Run

HOPPER = Path(__file__).parent / "hopper"
EXAMPLES = Path(__file__).parents[3] / "examples" / "runs"
PUBLISHED = {
    "llama3:llama3_8b": ("llama3.1-8b", "FSDP64 mbs1 recompute=alternate_matmuls"),
    "llama3:llama3_70b": ("llama3.1-70b", "TP8 FSDP8 mbs8 recompute=full"),
    "llama3:llama3_405b": ("llama3.1-405b", "TP8 FSDP8 mbs2 recompute=full"),
    "llama3:llama3_8b_mxfp8": ("llama3.1-8b", "FSDP64 mbs1 recompute=alternate_matmuls"),
    "llama3:llama3_debugmodel": ("llama3-debugmodel", "FSDP64 mbs8 recompute=alternate_matmuls"),
    "llama3:llama3_debugmodel_float8_emulate_lora": (
        "llama3-debugmodel", "FSDP64 mbs8 recompute=alternate_matmuls",
    ),
    "deepseek_v3:deepseek_v3_16b": ("deepseek_v3-16b", "EP8 FSDP64 mbs4 recompute=alternate_matmuls"),
    "deepseek_v3:deepseek_v3_671b": ("deepseek_v3-671b", "EP2 FSDP64 mbs4 recompute=alternate_matmuls"),
    "deepseek_v3:deepseek_v3_debugmodel_mtp": ("deepseek_v3-debugmodel", "FSDP64 mbs8 recompute=alternate_matmuls"),
    "gpt_oss:gpt_oss_20b": ("gpt-oss-20b", "FSDP64 mbs1 recompute=full"),
    "gpt_oss:gpt_oss_120b": ("gpt-oss-120b", "FSDP64 mbs1 recompute=full"),
    "qwen3:qwen3_0_6b": ("qwen3-0.6b", "FSDP64 mbs4 recompute=alternate_matmuls"),
    "qwen3:qwen3_1_7b": ("qwen3-1.7b", "FSDP64 mbs4 recompute=alternate_matmuls"),
    "qwen3:qwen3_14b": ("qwen3-14b", "FSDP64 mbs4 recompute=full"),
    "qwen3:qwen3_30b_a3b": ("qwen3-30b-a3b", "FSDP64 mbs2 recompute=full"),
    "qwen3:qwen3_32b": ("qwen3-32b", "FSDP64 mbs2 recompute=full"),
    "qwen3:qwen3_moe_debug": ("qwen3-debugmodel_moe", "FSDP64 mbs4 recompute=alternate_matmuls"),
    "qwen3:sft_qwen3_8b_math": ("qwen3-8b", "FSDP64 mbs1 recompute=alternate_matmuls"),
}  # fmt: skip

TOY = """
model: {hidden: 64, num_layers: 7, vocab: 512, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: notes.txt, tokenizer: bytes, sequence_length: 256}
batch: {global_sequences: 16, micro: 2}
cluster: h100-8x1
engine: torchtitan
train: {steps: 10, seed: 7}
"""
LATENT = """model={hidden: 256, num_layers: 6, vocab: 1024, ffn_hidden: 512, family: DeepseekV3ForCausalLM,
attention: {kind: mla, num_heads: 4, head_dim: 96, value_head_dim: 64, query_lora_rank: 64, kv_lora_rank: 32,
rope_head_dim: 32}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 128, num_shared: 1, num_dense_layers: 1,
router: sigmoid, num_groups: 4, groups_per_token: 2, routed_scale: 2.5}}"""
TOYS = {
    "zero-2-pipeline": (
        "parallel={data_shard: 2, pipeline: 2, virtual_pipeline: 2, tensor: 2, schedule: interleaved, "
        "sharding: gradients}",
        "train.checkpoint={folder: saved, every_steps: 5, keep: 3}",
        "optimizer={schedule: wsd, warmup_steps: 2, decay_ratio: 0.3, decay_shape: sqrt, gradient_clip: null}",
    ),
    "layers-by-hand": (
        "parallel={data_shard: 4, pipeline: 2, layers_per_stage: [5, 2], schedule: gpipe, sharding: parameters}",
    ),
    "replicas": (
        "parallel={data_shard: 8, sharding: none, recompute: full}", "precision=fp32",
        "optimizer={schedule: cosine_with_restarts, cycles: 3, final_ratio: 0}",
    ),
    "context-ranks": (
        "parallel={data_shard: 1, context: 2, pipeline: 4, schedule: gpipe, sharding: gradients}",
    ),
    "hybrid": (
        "parallel={data_shard: 4, data_replicate: 2, sharding: parameters}", "train.compile=true",
        "optimizer={schedule: polynomial, power: 2.5}",
    ),
    "tensor": ("parallel={data_shard: 4, tensor: 2, sequence_parallel: false, sharding: parameters}",),
    "adapters": (
        "task=lora", "lora={rank: 4, alpha: 12, targets: [query, key, value, up]}",
        "parallel={data_shard: 8, sharding: parameters}", "optimizer.schedule=constant",
    ),
    "experts": (LATENT, "parallel={data_shard: 8, expert: 4, sharding: parameters}", "train.balance_bias_rate=0.01"),
    "windows": ("model=gpt-oss-20b", "parallel={data_shard: 8, sharding: parameters}"),
    "evaluated": (
        "parallel={data_shard: 2, sharding: parameters, context: 2, tensor: 2}", "data.sequence_length=1024",
        "data.validation=held-out.txt", "train.evaluate={every_steps: 5, num_batches: 3}",
        "train.trackers=[tensorboard, wandb]", "optimizer.states=bf16",
    ),
}  # fmt: skip


def toy(name: str) -> Run:
    return runfile.loads(TOY, overrides=TOYS[name])


ON_EIGHT = (
    "engine=torchtitan", "cluster=h100-8x1", "batch.micro=1", "train.steps=100", "train.tokens=null",
    "optimizer.warmup_steps=0", "parallel={data_shard: 8, sharding: parameters, recompute: full}",
)  # fmt: skip


def example(path: Path) -> Run | None:
    """An example run file on eight devices; None: torchtitan cannot take it."""
    run = runfile.load(path, overrides=ON_EIGHT)
    return None if find_engine("torchtitan").check(run) else run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Exported runs by name."""
    found = {path.stem: example(path) for path in sorted(EXAMPLES.glob("*.yaml"))}
    return {name: toy(name) for name in TOYS} | {name: run for name, run in found.items() if run is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, runs) -> Path:
    folder = tmp_path_factory.mktemp("configurations")
    for name, run in runs.items():
        write_files(find_engine("torchtitan").lower(run, folder=folder / name), folder / name)
    return folder


@pytest.fixture(scope="module")
def trees(folder, runs) -> dict[str, dict]:
    return read([*PUBLISHED, *(f"{name}/meshwright_run.py:train" for name in runs)], folder=folder)


def read(sources: list[str], *, folder: Path) -> dict[str, dict]:
    """Return the trees of configurations as text; paths are relative to `folder`."""
    with chdir(folder):
        return {source: read_tree(*source.rsplit(":", 1)) for source in sources}


def executed(sources: list[str], *, folder: Path) -> dict[str, dict]:
    """Return the trees that torchtitan builds; one function can be refused there and read as text."""
    path = os.pathsep.join([str(HOPPER), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.torchtitan.executed", *sources],
        cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compared(tree: object) -> object:
    """Return a tree without the names of functions' classes, and without the settings of torchao's recipes."""
    if isinstance(tree, dict):
        if "function" in tree:
            return tree | {"function": tree["function"].rpartition(".")[2]}
        return {key: compared(value) for key, value in tree.items() if key != "_torchao_config"}
    return [compared(one) for one in tree] if isinstance(tree, list) else tree


def test_text_states_what_torchtitan_builds(trees, folder):
    built = executed([*trees], folder=folder)
    errors = {name for name, tree in built.items() if "error" in tree}
    assert errors <= {"llama3:llama3_8b_mxfp8"}  # of Blackwell
    for name in trees.keys() - errors:
        assert compared(trees[name]) == compared(built[name]), name


@pytest.mark.slow
def test_every_registry_is_read_as_torchtitan_builds_it(tmp_path):
    spec = find_spec("torchtitan")
    package = Path(spec.origin).parent
    sources = []
    for registry in sorted(package.rglob("config_registry.py")):
        module = ".".join(("torchtitan", *registry.relative_to(package).with_suffix("").parts))
        found = recognised(registry)  # None: none of its functions returns a Trainer.Config
        sources += [f"{module}:{name}" for name in found.functions] if found else []
    built = executed(sources, folder=tmp_path)
    num_equal = 0
    for source, tree in built.items():
        if "error" not in tree and "transformers_modeling_backend" not in source:  # its shapes are of another package
            assert compared(read([source], folder=tmp_path)[source]) == compared(tree), source
            num_equal += 1
    assert num_equal > 60


@pytest.mark.parametrize("source", ["llama3:llama3_405b", "deepseek_v3:deepseek_v3_16b", "qwen3:qwen3_30b_a3b"])
def test_the_text_of_the_release_is_that_of_the_package(trees, tmp_path, monkeypatch, source):
    tree = trees.get(source) or read([source], folder=tmp_path)[source]
    monkeypatch.setattr(ProjectModules, "_installed", None)
    monkeypatch.chdir(tmp_path)
    assert read([source], folder=tmp_path)[source] == tree


NAMES = (*dict(FACTS.switches), "compiles")
SWITCHES = {
    "-".join(map(str, values)): dict(zip(NAMES, values, strict=True))
    for values in product(*((None, *kinds) for kinds in dict(FACTS.switches).values()), (False, True))
}
"""Every combination of the switches that the engine sets, `train.compile` among them."""


def test_the_stack_of_an_export_is_that_of_its_run(tmp_path):
    runs = {}
    for name, switches in SWITCHES.items():
        stated = {key: value for key, value in switches.items() if value is not None}
        overrides = [f"stack={json.dumps(stated)}", f"train.compile={json.dumps(switches['compiles'])}"]
        runs[name] = runfile.loads(TOY, overrides=[*TOYS["experts"], *overrides])
        write_files(find_engine("torchtitan").lower(runs[name], folder=tmp_path / name), tmp_path / name)
    trees = read([f"{name}/meshwright_run.py:train" for name in runs], folder=tmp_path)
    defaults = {"dispatcher": "all-to-all", "gradient_format": "fp32", "cuda_graphs": "none"}
    for name, run in runs.items():
        found = import_tree(trees[f"{name}/meshwright_run.py:train"], cluster="h100-8x1")
        assert found.content["stack"] == defaults | run.stack.features.stated(), name
        assert switches_of(loaded(found)) == switches_of(run), name
        assert found.notes == ()


def test_torchtitan_replays_graphs_unless_told_not_to(trees, runs):
    assert {graphs_are_off(tree) for tree in trees.values() if tree.get("is") == "Trainer"} == {True, False}
    for source, tree in trees.items():
        if tree.get("is") == "Trainer":
            found = import_tree(tree, cluster="h100-8x8")
            if "framework" not in found.content["stack"]:
                assert found.content["stack"]["cuda_graphs"] == ("none" if graphs_are_off(tree) else "full")
            else:  # the estimate is of another program, and so are the switches
                found = import_tree(tree, cluster="h100-8x1")
                assert switches_of(loaded(found)) == switches_of(runs[source.partition("/")[0]])


def graphs_are_off(tree: dict) -> bool:
    return tree["fields"]["training"]["fields"]["disable_cuda_graphs"]


def test_kernels_that_a_cluster_lacks_are_noted(trees):
    tree = json.loads(json.dumps(trees["experts/meshwright_run.py:train"]))
    for layer in tree["fields"]["model_spec"]["fields"]["model"]["fields"]["layers"]:
        if layer["fields"]["moe"]:
            routed = layer["fields"]["moe"]["fields"]["routed_experts"]["fields"]
            routed["token_dispatcher"]["is"] = "HybridEPTokenDispatcher"
    assert import_tree(tree, cluster="h100-8x1").content["stack"]["dispatcher"] == "hybridep"
    found = import_tree(tree, cluster="mi300x-8x1")
    assert found.content["stack"]["dispatcher"] == "all-to-all"
    assert "the run file does not contain comm_backend hybridep of experts on mi300x" in "".join(found.notes)


def changed(tree: dict, **settings: object) -> dict:
    """Return a copy of a tree with `section__field` set."""
    tree = json.loads(json.dumps(tree))
    for name, value in settings.items():
        section, _, key = name.partition("__")
        tree["fields"][section]["fields"][key] = value
        tree["fields"][section]["given"].append(key)
    return tree


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer__implementation": "foreach"}, ["optimizer.implementation = 'foreach'"]),
        ({"compile__enable": True, "compile__components": ["model"]}, ["compile.components = ['model']"]),
        ({"parallelism__enable_fsdp_symm_mem": True}, ["parallelism.enable_fsdp_symm_mem = True"]),
        ({"parallelism__spmd_backend": "full_dtensor"}, ["parallelism.spmd_backend = 'full_dtensor'"]),
        ({"debug__batch_invariant": True, "debug__seed": 4}, ["debug.batch_invariant = True"]),
        ({"override__imports": ["mine.fused_rope"]}, ["override.imports = ['mine.fused_rope']"]),
        ({"activation_checkpoint__debug": True}, ["activation_checkpoint.debug = True"]),
    ],
)
def test_one_note_names_what_the_estimate_does_not_include(trees, settings, named):
    found = import_tree(changed(trees["replicas/meshwright_run.py:train"], **settings), cluster="h100-8x1")
    assert found.notes == (f"the estimate does not include: {', '.join(named)}",)


def test_a_loss_in_chunks_is_imported(trees):
    found = import_tree(trees["llama3:llama3_8b"], cluster="h100-8x8")
    micro, length = found.content["batch"]["micro"], found.content["data"]["sequence_length"]
    assert found.content["kernels"] == {"loss_chunk": micro * length // 8}
    assert not [note for note in found.notes if "loss" in note]
    uneven = changed(trees["llama3:llama3_8b"], loss__num_chunks=7)
    with pytest.raises(InputError, match=r"got 'loss.num_chunks = 7', allowed: divisors of 8192"):
        import_tree(uneven, cluster="h100-8x8")


@pytest.mark.parametrize(
    ("backend", "cluster", "kernel"),
    [
        ("varlen", "h100-8x1", "fa3"), ("varlen", "a100-8x1", "fa2"), ("varlen", "b200-8x1", None),
        ("varlen", "mi300x-8x1", None), ("flex_flash", "h100-8x1", None), ("flex", "h100-8x1", None),
    ],
)  # fmt: skip
def test_kernels_of_attention_are_read_or_named(trees, backend, cluster, kernel):
    tree = changed(trees["hybrid/meshwright_run.py:train"])
    for layer in tree["fields"]["model_spec"]["fields"]["model"]["fields"]["layers"]:
        inner = layer["fields"]["attention"]["fields"]["inner_attention"]
        inner["is"] = "VarlenAttention" if backend == "varlen" else "FlexAttention"
        inner["fields"]["kernel_options"] = {"BACKEND": "FLASH"} if backend == "flex_flash" else {}
    found = import_tree(tree, cluster=cluster)
    assert found.content["stack"].get("attention") == kernel
    is_named = backend != "flex" and kernel is None
    accelerator = cluster.partition("-8x")[0]
    named = f"the estimate does not include: attn_backend {backend} on {accelerator}"
    assert found.notes == ((named,) if is_named else ())


def test_collectives_in_their_gemms_are_overlapped(trees):
    tree = changed(trees["tensor/meshwright_run.py:train"])
    assert import_tree(tree, cluster="h100-8x1").content["stack"]["overlaps_tensor"] is False
    for layer in tree["fields"]["model_spec"]["fields"]["model"]["fields"]["layers"]:
        layer["fields"]["feed_forward"]["is"] = "AllGatherFusedFeedForward"
    assert import_tree(tree, cluster="h100-8x1").content["stack"]["overlaps_tensor"] is True


def loaded(found: Imported) -> Run:
    stream = StringIO()
    YAML().dump(found.content, stream)
    return runfile.loads(stream.getvalue())


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_configurations_become_runs(trees, source):
    found = import_tree(trees[source], cluster="b200-8x8" if source.endswith("mxfp8") else "h100-8x8")
    run = loaded(found)
    fields = trees[source]["fields"]
    assert (run.model.name, run.plan.describe()) == PUBLISHED[source]
    assert run.sequence_length == fields["training"]["fields"]["seq_len"]
    assert run.num_steps == fields["training"]["fields"]["steps"]
    groups = fields["optimizer"]["fields"]["param_groups"]
    assert run.optimizer.learning_rate == groups[-1]["fields"]["optimizer_kwargs"]["lr"]
    assert run.global_batch == run.micro_batch * run.plan.data
    assert len(run.text.splitlines()) < 100


def test_recipes_adapters_and_what_is_noted(trees):
    giant = import_tree(trees["llama3:llama3_405b"], cluster="h100-8x64")
    assert giant.content["precision"] == "fp8_rowwise"
    assert giant.content["train"]["compile"]
    assert giant.content["stack"]["overlaps_tensor"] is True
    assert not [note for note in giant.notes if "enable_async_tensor_parallel" in note]
    assert import_tree(trees["llama3:llama3_8b_mxfp8"], cluster="h100-8x8").content["precision"] == "mxfp8"
    adapted = import_tree(trees["llama3:llama3_debugmodel_float8_emulate_lora"], cluster="h100-8x8")
    assert adapted.content["task"] == "lora"
    assert "model_spec: fp8 is emulated, which is not carried over" in adapted.notes
    assert any(note.startswith("fp8_rowwise without compile.enable") for note in adapted.notes)
    small = import_tree(trees["llama3:llama3_debugmodel"], cluster="h100-8x8")
    for words in (
        "parallelism.pipeline_parallel_schedule has no effect: there is one stage",
        "validator.freq, validator.steps has no effect: validator.enable is false",
        "optimizer: weight decay of norms is not carried over",
    ):
        assert words in small.notes
    chat = import_tree(trees["qwen3:sft_qwen3_8b_math"], cluster="h100-8x8")
    assert any("ChatDataLoader is not carried over" in note for note in chat.notes)


@pytest.mark.parametrize("name", TOYS)
def test_our_own_exports_come_back_as_they_were(trees, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    assert_back(toy(name), trees[f"{name}/meshwright_run.py:train"])


def test_the_example_run_files_come_back_as_they_were(trees, runs, folder, monkeypatch):
    monkeypatch.chdir(folder)
    taken = [name for name in runs if name not in TOYS]
    assert len(taken) >= 3
    for name in taken:
        assert_back(runs[name], trees[f"{name}/meshwright_run.py:train"])


def assert_back(run: Run, tree: dict) -> None:
    found = import_tree(tree, cluster=run.cluster_name)
    again = loaded(found)
    assert found.notes == ()
    assert same_model(again.model, run.model)
    plan = run.plan if run.plan.pipeline > 1 else replace(run.plan, schedule=again.plan.schedule)
    assert again.plan == plan
    assert replace(again.train, steps=None) == replace(run.train, steps=None, tokens=None)
    for name in ("sequence_length", "global_batch", "micro_batch", "num_steps", "precision", "data", "task",
                 "weights", "engine", "cluster"):  # fmt: skip
        assert getattr(again, name) == getattr(run, name), name
    ratio = again.optimizer.decay_ratio if run.optimizer.schedule.value != "wsd" else run.optimizer.decay_ratio
    assert again.optimizer == replace(run.optimizer, decay_ratio=ratio)
    if run.lora is not None:
        assert replace(again.lora, targets=()) == replace(run.lora, targets=())
        assert set(again.lora.targets) == set(run.lora.targets)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("flux:flux_dev", "is no Trainer.Config: got 'FluxTrainer'"),
        ("kimi_k2_7:kimi_k2_5", "a model that run files do not support: got 'kimi_k2_5'"),
        ("llama3:llama3_9b", "has no function llama3_9b: got 'llama3_9b', allowed: llama3_debugmodel"),
    ],
)
def test_what_is_no_training_or_is_not_there_says_so(meshwright, source, words):
    outcome = meshwright("import", source, "--cluster", "h100-8x8")
    assert outcome.exit_code == 2
    assert words in outcome.stderr, outcome.stderr


def test_one_command_reads_and_writes(meshwright, folder, monkeypatch):
    monkeypatch.chdir(folder)
    outcome = meshwright("import", "replicas/meshwright_run.py", "--cluster", "h100-8x1", "--out", "back.yaml")
    assert outcome.exit_code == 0, outcome.stderr
    assert runfile.load("back.yaml").plan == toy("replicas").plan
    gone = meshwright("import", "nowhere/meshwright_run.py", "--cluster", "h100-8x1")
    assert gone.exit_code == 2
    assert "there is no such file" in gone.stderr
