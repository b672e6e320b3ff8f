"""`meshwright import` of torchtitan's TOML files: what is carried, refused and noted."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright import runfile

LLAMA = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = false
[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
async_mode = "async"
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


@pytest.fixture
def imported(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text: str = LLAMA, cluster: str = "h100-8x1"):
        (tmp_path / "titan.toml").write_text(text)
        return meshwright("import", "titan.toml", "--cluster", cluster, "--out", "run.yaml")

    return run


def test_a_file_of_torchtitan_becomes_a_run(imported):
    outcome = imported()
    assert outcome.exit_code == 0, outcome.stderr
    run = runfile.load("run.yaml")
    assert run.model.name == "llama3.1-8b"
    assert run.plan.describe() == "TP2 FSDP4 mbs1 recompute=alternate_matmuls"
    assert (run.global_batch, run.sequence_length, run.num_steps) == (4, 8192, 1000)
    assert run.optimizer.learning_rate == 3e-4
    assert (run.optimizer.schedule.value, run.optimizer.final_ratio) == ("linear", 0.0)
    assert run.train.checkpoint.asynchronous
    assert run.train.checkpoint.keep == 10
    assert [t.value for t in run.train.trackers] == ["tensorboard"]
    assert run.train.checkpoint.folder == "outputs/checkpoint"
    assert outcome.stderr == ""  # what stands there at its default says nothing


def test_what_is_imported_can_be_exported(imported, meshwright):
    imported()
    outcome = meshwright("export", "run.yaml", "--out", "again", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["engine"] == "torchtitan"
    assert outcome.json["plan"]["tensor"] == 2
    assert outcome.json["plan"]["data_shard"] == 4


def test_a_plan_that_does_not_fit_is_noted(imported):
    outcome = imported(LLAMA.replace('"8B"', '"405B"'))
    assert outcome.exit_code == 0
    assert "note: the plan does not fit" in outcome.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("local_batch_size = 1", "local_batch_size = 3\nglobal_batch_size = 16", "does not divide into portions"),
        ('flavor = "8B"', 'flavor = "9B"', "no model of the catalogue"),
        ('name = "AdamW"', 'name = "Muon"', "an optimizer"),
        ('selective_ac_option = "op"', 'selective_ac_option = "mm"', "or every n-th layer"),
        ("seq_len = 8192", "seq_lenght = 8192", "did you mean training.seq_len?"),
        ("seq_len = 8192", "seq_len = '8192'", "training.seq_len has another type"),
        ("steps = 1000", "steps = 1000\nenable_cpu_offload = true", "parameters in host memory"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["int4"]', "a converter that run files do not support"),
        (
            "tensor_parallel_degree = 2",
            "pipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = 7",
            "layers cannot be split over the stages",
        ),
        (
            "tensor_parallel_degree = 2",
            "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2",
            "micro-batches do not divide the local batch",
        ),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "do not divide the 8 devices"),
        ("[model]", "[model", "is not TOML"),
        ("[model]", "[models]", "is not a configuration of torchtitan"),
    ],
)
def test_what_a_run_file_cannot_say_is_refused(imported, old, new, message):
    outcome = imported(LLAMA.replace(old, new))
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_defaults_of_its_files_are_its_own(imported):
    outcome = imported('[model]\nname = "llama3"\nflavor = "8B"\n', cluster="h100-8x4")
    assert outcome.exit_code == 0, outcome.stderr
    run = runfile.load("run.yaml")
    assert (run.micro_batch, run.sequence_length, run.num_steps) == (8, 2048, 10_000)
    assert run.plan.describe() == "FSDP32 mbs8 recompute=full of 16 layers"  # every second layer, whole
    assert run.optimizer.warmup_steps == 200


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("steps = 1000", "steps = 10", "optimizer.warmup_steps", 10),
        ("warmup_steps = 200", 'decay_ratio = 0.8\ndecay_type = "cosine"', "optimizer.schedule", "wsd"),
        ("warmup_steps = 200", 'decay_ratio = 0.8\ndecay_type = "cosine"', "optimizer.decay_shape", "cosine"),
        ("warmup_steps = 200", 'decay_type = "sqrt"', "optimizer.decay_ratio", 1.0),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["mx"]', "precision", "mxfp8"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]', "precision", "fp8"),
        ("[model]", "[debug]\nseed = 7\n[model]", "train.seed", 7),
        ("max_norm = 1.0", "seed = 7", "train.seed", 7),
        (
            "[compile]",
            "[validation]\nenable = true\nfreq = 50\nsteps = 4\n[compile]",
            "train.evaluate",
            {"every_steps": 50, "num_batches": 4},
        ),
        ("tensor_parallel_degree = 2", "[experimental]\npipeline_parallel_degree = 4", "parallel.pipeline", 4),
        (
            "tensor_parallel_degree = 2",
            'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"'
            "\npipeline_parallel_layers_per_stage = 6",
            "parallel.virtual_pipeline",
            3,
        ),
        ('name = "llama3"\nflavor = "8B"', 'name = "deepseek_v3"\nflavor = "671B"', "model.num_mtp_layers", 0),
        (
            "enable = true\nfolder",
            'initial_load_path = "there"\ninitial_load_in_hf = true\nenable = true\nfolder',
            "weights",
            "there",
        ),
    ],
)
def test_what_a_file_says_is_carried(imported, meshwright, old, new, key, value):
    assert old in LLAMA
    outcome = imported(LLAMA.replace(old, new), cluster="b200-8x8")  # which multiplies mxfp8
    assert outcome.exit_code == 0, outcome.stderr
    found = YAML(typ="safe").load(Path("run.yaml").read_text())
    for part in key.split("."):
        found = found.get(part, 0)
    assert found == value


def test_a_pipeline_that_is_drained_several_times_a_step_is_noted(imported):
    text = LLAMA.replace("local_batch_size = 1", "local_batch_size = 2\nglobal_batch_size = 64")
    outcome = imported(text.replace("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2"))
    assert "drains the pipeline after 2 micro-batches, 8 times a step" in outcome.stderr
    assert "training.local_batch_size = 16 would be equivalent" in outcome.stderr
    assert "parallel.layers_per_stage can express" not in outcome.stderr  # 34 / 2, an end less on both


def test_a_file_in_windows_lines(imported):
    outcome = imported(LLAMA.replace("\n", "\r\n"))
    assert outcome.exit_code == 0, outcome.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["config.ini"], "name the engine with --engine"),
        (["config.yaml", "--engine", "torchtitan"], "no configuration of torchtitan"),
        (["gone.py"], "there is no such file"),
        (["empty.yaml"], "the file is empty: got 'empty.yaml'"),
        (["folder"], "hint: meshwright import --survey folder lists"),
    ],
)
def test_whose_configuration_it_is_is_told_by_its_name_or_said(meshwright, tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("\n")
    (tmp_path / "folder").mkdir()
    outcome = meshwright("import", *source, "--cluster", "h100-8x1")
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_configurations_of_the_release_are_read_without_torchtitan(meshwright, monkeypatch):
    monkeypatch.setattr("meshwright.engines.torchtitan.config_text.modules.ProjectModules._installed", None)
    outcome = meshwright("import", "llama3:llama3_70b", "--cluster", "h100-8x64")
    assert outcome.exit_code == 0, outcome.stderr
    assert "model: llama3.1-70b" in outcome.stdout


def test_an_ending_belongs_to_the_engine_whose_facts_say_so(meshwright, engine_package, install_engines):
    for name in ("mine", "yours"):
        engine_package(
            name,
            facts="from types import SimpleNamespace\nFACTS = SimpleNamespace(configurations=('.mine', ':'))\n",
            contract="from meshwright.errors import InputError\n"
            f"def import_run(source, *, cluster):\n    raise InputError('{name} reads it')\n",
        )
    install_engines(mine="mine.contract")
    for source in ("run.mine", "module:function"):
        assert "mine reads it" in meshwright("import", source, "--cluster", "h100-8x1").stderr
    install_engines(mine="mine.contract", yours="yours.contract")
    outcome = meshwright("import", "run.mine", "--cluster", "h100-8x1")
    assert "got 'run.mine', allowed: mine, yours\nhint: name the engine with --engine" in outcome.stderr
    assert "yours reads it" in meshwright("import", "run.mine", "--cluster", "h100-8x1", "--engine", "yours").stderr


def test_an_unknown_key_is_left_out_when_it_is_named(imported, meshwright):
    text = LLAMA + "[hf_transformers]\nmodel = 'x'\n"
    assert "--ignore hf_transformers.model leaves out" in imported(text).stderr
    outcome = meshwright("import", "titan.toml", "--cluster", "h100-8x1", "--ignore", "hf_transformers.model")
    assert outcome.exit_code == 0, outcome.stderr
    assert "--ignore left out hf_transformers.model" in outcome.stderr


@pytest.mark.parametrize(
    ("key", "message"),
    [("training.steps", "this one is read: got 'training.steps'"), ("job.name", "the configuration has no such key")],
)
def test_a_key_that_is_read_or_absent_is_not_ignored(imported, meshwright, key, message):
    imported(LLAMA)
    outcome = meshwright("import", "titan.toml", "--cluster", "h100-8x1", "--ignore", key)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
