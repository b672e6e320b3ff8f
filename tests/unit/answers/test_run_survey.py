"""A survey of configurations names the project of each file, reads it or says why not, and runs nothing."""

from __future__ import annotations

import json

import pytest

from meshwright.answers import run_survey
from meshwright.answers.run_survey import ImportStatus, survey
from meshwright.engines.recognition import recognised

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
steps = 1000
local_batch_size = 1
[activation_checkpoint]
mode = "full"
"""
MAXTEXT = """
base_emb_dim: 4096
base_num_query_heads: 32
base_num_kv_heads: 8
base_num_decoder_layers: 32
base_mlp_dim: 14336
vocab_size: 128256
decoder_block: llama2
ici_fsdp_parallelism: 24
"""
MEGATRON = "MODEL_ARGS:\n  --num-layers: 12\n"
FILES = {
    "titan.toml": (TITAN, "TorchTitan"),
    "titan_without_ending": (TITAN, "TorchTitan"),
    "maxtext.yaml": (MAXTEXT, "MaxText"),  # an ending of Megatron
    "megatron.yaml": (MEGATRON, "Megatron-LM"),
    "bridge.yaml": ("train:\n  train_iters: 10\nmodel:\n  num_layers: 2\n", "Megatron-Bridge"),
    "call.sh": ("#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 12\n", "Megatron-LM"),
    "recipe.sh": ("python3 -m MaxText.train MaxText/configs/base.yml \\\n  steps=10\n", "MaxText"),
    "trainer.sh": (
        "deepspeed train_sft.py \\\n  --model_name_or_path m \\\n  --per_device_train_batch_size 2\n",
        "script of a trainer",
    ),
    "config_registry.py": (
        "from torchtitan.trainer import Trainer\nraise SystemExit(9)\ndef tiny() -> Trainer.Config:\n    pass\n",
        "TorchTitan",
    ),
}
OTHERS = {
    "Dockerfile": "FROM x\nRUN python pretrain_gpt.py --num-layers 2\n",
    "titan.sh": "torchrun --nproc_per_node=8 train.py --job.config_file ./llama3.toml --training.steps 10\n",
    "pyproject.toml": '[project]\nname = "x"\n',
    "README.md": "```\npython3 -m MaxText.train base.yml steps=10\n```\n",
    "compose.yml": "services:\n  web:\n    image: x\n",
    "rules.yml": "logical_axis_rules: [[norm, fsdp]]\nmesh_axes: [data]\n",
    "setup.sh": "#!/bin/bash\npip install maxtext\n",
    "plain.py": "print(1)\n",
    "broken.toml": "[model\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    for name, text in OTHERS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    return tmp_path


def test_whose_a_file_is_shows_in_its_content(folder):
    found = {path.name: recognised(path) for path in folder.iterdir()}
    assert {name: mark.project for name, mark in found.items() if mark} == {n: p for n, (_, p) in FILES.items()}


def test_every_file_has_a_status_and_nothing_runs(folder):
    files = {str(file.path): file for file in survey(folder, cluster=None).files}
    assert {name.partition(":")[0] for name in files} == FILES.keys()
    assert files["titan.toml"].status is ImportStatus.READ
    assert (files["maxtext.yaml"].cluster, files["titan.toml"].cluster) == ("h100-8x3", "h100-8x64")
    module = files["config_registry.py:tiny"]
    assert module.status is ImportStatus.REFUSED
    assert "tiny is no Trainer.Config" in module.reasons[0]
    assert files["megatron.yaml"].status is ImportStatus.REFUSED
    assert files["megatron.yaml"].reasons


def test_a_given_cluster_is_the_only_one(folder):
    (found,) = (file for file in survey(folder, cluster="h100-8x1").files if file.path.name == "maxtext.yaml")
    assert "do not fill the 8 devices" in found.reasons[0]


def test_a_file_that_breaks_its_reader_does_not_end_the_survey(folder, monkeypatch):
    def broken(source: str, **_: object) -> None:
        raise KeyError(source)

    monkeypatch.setattr(run_survey, "import_configuration", broken)
    found = survey(folder, cluster="h100-8x1")
    assert {file.status for file in found.files} == {ImportStatus.REFUSED}
    assert "KeyError in the reader" in found.files[0].reasons[0]


def test_the_command_counts_and_prints(meshwright, folder):
    outcome = meshwright("import", "--survey", str(folder), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["counts"]["TorchTitan"] == {"read": 2, "read with notes": 0, "refused": 1}
    assert sum(map(sum, (counts.values() for counts in document["counts"].values()))) == len(FILES)
    table = meshwright("import", "--survey", str(folder))
    assert (table.exit_code, "titan.toml" in table.stdout) == (0, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--survey", "nowhere"], "there is no such folder"),
        (["--survey", ".", "--out", "x.yaml"], "--survey does not go with: got '--out'"),
        (["titan.toml"], "missing option '--cluster'"),
    ],
)
def test_what_a_survey_does_not_take_is_said(meshwright, folder, monkeypatch, given, message):
    monkeypatch.chdir(folder)
    outcome = meshwright("import", *given)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_without_an_engine_the_content_decides(meshwright, folder, monkeypatch):
    monkeypatch.chdir(folder)
    outcome = meshwright("import", "maxtext.yaml steps=7", "--cluster", "h100-8x3")
    assert outcome.exit_code == 0, outcome.stderr
    assert "engine: maxtext" in outcome.stdout


def test_a_refusal_that_is_the_same_on_several_clusters_is_not_tried_on_all(tmp_path, monkeypatch):
    (tmp_path / "train.sh").write_text("python pretrain_gpt.py --no-such-option\n", encoding="utf-8")
    tried = []
    read = run_survey.import_configuration
    monkeypatch.setattr(
        run_survey, "import_configuration", lambda *args, **more: tried.append(more["cluster"]) or read(*args, **more)
    )
    (found,) = survey(tmp_path, cluster=None).files
    assert (found.status, tried) == (ImportStatus.REFUSED, ["h100-8x64", "h100-8x1", "h100-8x2", "h100-8x3"])
