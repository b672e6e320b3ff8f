"""`meshwright import` of torchtitan's TOML files: what is carried, refused and noted."""

from __future__ import annotations

from importlib import metadata

import pytest

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
    assert outcome.stderr.splitlines() == [
        "note: parallelism.enable_async_tensor_parallel = False is not carried over"
    ]


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
        (
            "local_batch_size = 1",
            "local_batch_size = 3\nglobal_batch_size = 16",
            "does not divide into portions",
        ),
        ('flavor = "8B"', 'flavor = "9B"', "no model of the catalogue"),
        ('name = "AdamW"', 'name = "Muon"', "an optimizer"),
        ('selective_ac_option = "op"', 'selective_ac_option = "2"', "every n-th layer"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "do not divide the 8 devices"),
        ("[model]", "[model", "is no TOML"),
        ("[training]", "[trainings]", "is no configuration of torchtitan"),
    ],
)
def test_what_a_run_file_cannot_say_is_refused(imported, old, new, message):
    outcome = imported(LLAMA.replace(old, new))
    assert outcome.exit_code == 2
    assert message in outcome.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["config.ini"], "say it with --engine"),
        (["config.yaml", "--engine", "torchtitan"], "no configuration of torchtitan"),
        (["gone.py"], "there is no such file"),
        (["gone.json"], "cannot read the trees"),
        (["tree.json"], "does not hold one tree"),
    ],
)
def test_whose_configuration_it_is_is_told_by_its_name_or_said(
    meshwright, tmp_path, monkeypatch, source, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.engines.torchtitan.importing.require_version", lambda: None)
    (tmp_path / "tree.json").write_text("{}")
    outcome = meshwright("import", *source, "--cluster", "h100-8x1")
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_modules_are_programs_that_need_torchtitan(meshwright, monkeypatch):
    def absent(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("meshwright.engines.machine.metadata.version", absent)
    outcome = meshwright("import", "llama3:llama3_8b", "--cluster", "h100-8x1")
    assert outcome.exit_code == 3
    assert "pip install 'meshwright[torchtitan]'" in outcome.stderr


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
    assert "got 'run.mine', allowed: mine, yours\nhint: say it with --engine" in outcome.stderr
    assert (
        "yours reads it"
        in meshwright("import", "run.mine", "--cluster", "h100-8x1", "--engine", "yours").stderr
    )
