"""`meshwright checkpoint`: what is there, whether it is whole, and weights to Hugging Face and back."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from meshwright.programs import install_command
from meshwright.training import cpu_libraries

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")


@pytest.fixture
def run_file(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(tiny_text)
    return "run.yaml"


@pytest.fixture(scope="module")
def trained_once(tiny_run, tmp_path_factory):
    """The folder of a run with checkpoints after steps 2 and 4."""
    training = tiny_run(tmp_path_factory.mktemp("trained"))
    training.train()
    return training.folder


@pytest.fixture
def trained(run_file, trained_once, tmp_path):
    """A copy of its checkpoints beside the run file."""
    shutil.copytree(trained_once / "saved", tmp_path / "saved")
    return tmp_path


def alter(folder) -> None:
    path = next(folder.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_show_says_what_is_there(meshwright, trained, run_file):
    newest = meshwright("checkpoint", "show", run_file, "--json").json["checkpoints"][-1]
    assert (newest["step"], newest["tokens"], newest["model"]) == (4, 4 * 4 * 16, "tiny")
    assert newest["plan"] == "DP1 ddp mbs2"
    assert newest["bytes"] > 0
    shown = meshwright("checkpoint", "show", "saved")
    assert shown.exit_code == 0
    assert "tiny" in shown.stdout


def test_verify_says_yes(meshwright, trained):
    outcome = meshwright("checkpoint", "verify", "saved", "--json")
    assert outcome.exit_code == 0
    assert outcome.json["last_good"] == "saved/step-00000004"
    assert meshwright("checkpoint", "verify", "saved/step-00000002").exit_code == 0


def test_verify_names_the_last_good_one(meshwright, trained):
    alter(trained / "saved" / "step-00000004")
    outcome = meshwright("checkpoint", "verify", "saved")
    assert outcome.exit_code == 1
    assert "was altered" in outcome.stdout
    assert "The last good one is saved/step-00000002." in outcome.stdout
    document = meshwright("checkpoint", "verify", "saved", "--json")
    assert document.exit_code == 1
    assert document.json["damaged"] == ["saved/step-00000004"]


def test_weights_go_to_hugging_face_and_back(meshwright, trained, run_file, tiny_text):
    out = meshwright("checkpoint", "to-hf", run_file, "hf", "--dtype", "fp32", "--json")
    assert out.exit_code == 0, out.stderr
    assert out.json["step"] == 4
    assert (trained / "hf" / "config.json").is_file()
    again = tiny_text.replace("folder: saved", "folder: again")
    (trained / "again.yaml").write_text(again)
    back = meshwright("checkpoint", "from-hf", "again.yaml", "hf")
    assert back.exit_code == 0, back.stderr
    assert meshwright("checkpoint", "to-hf", "again.yaml", "hf2", "--dtype", "fp32").exit_code == 0
    first, second = (load_file(trained / name / "model.safetensors") for name in ("hf", "hf2"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    begun = meshwright("train", "again.yaml", "--resume", "--json")
    assert begun.exit_code == 0, begun.stderr
    assert begun.json["statistics"]["steps"] == 4


def test_weights_that_do_not_fit_on_the_disk_name_their_folder(meshwright, trained, run_file, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python 3.11 keeps a module's file that was cut
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        found = meshwright("checkpoint", "to-hf", run_file, "hf", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.exit_code == 2
    assert "hf" in found.json["error"]["message"]
    assert "File too large" in found.json["error"]["message"]
    assert not [path for path in trained.iterdir() if "hf" in path.name]


def test_what_came_from_hugging_face_stays_through_training(
    meshwright, trained, run_file, tiny_text, without_measuring, without_page
):
    first = meshwright("checkpoint", "to-hf", run_file, "hf")
    assert "note: the run has no tokenizer" in first.stderr
    config = json.loads((trained / "hf" / "config.json").read_text()) | {"eos_token_id": [7, 9]}
    (trained / "hf" / "config.json").write_text(json.dumps(config))
    (trained / "again.yaml").write_text(tiny_text.replace("folder: saved", "folder: again"))
    assert meshwright("checkpoint", "from-hf", "again.yaml", "hf").exit_code == 0
    assert meshwright("train", "again.yaml", "--resume").exit_code == 0
    outcome = meshwright("checkpoint", "to-hf", "again.yaml", "out", "--json")
    assert (outcome.json["step"], outcome.json["notes"]) == (4, [])
    assert json.loads((trained / "out" / "config.json").read_text()) == config


def test_routing_biases_go_along(meshwright, run_file, tmp_path, tiny_text, without_measuring, without_page):
    """A mixture whose router balances load holds a buffer beside its weights."""
    experts = (
        ", experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1, num_dense_layers: 1,"
        " router: sigmoid}}\ndata:"
    )
    latent = (
        "{kind: mla, num_heads: 4, num_kv_heads: 4, head_dim: 16, value_head_dim: 8, kv_lora_rank: 16,"
        " rope_head_dim: 8}"
    )
    text = tiny_text.replace("{num_heads: 4, num_kv_heads: 2}", latent).replace("}\ndata:", experts, 1)
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "again.yaml").write_text(text.replace("folder: saved", "folder: again"))
    assert meshwright("train", run_file, "--json").exit_code == 0
    for arguments in (
        ("to-hf", run_file, "hf", "--dtype", "fp32"),
        ("from-hf", "again.yaml", "hf"),
        ("to-hf", "again.yaml", "hf2", "--dtype", "fp32"),
    ):
        outcome = meshwright("checkpoint", *arguments)
        assert outcome.exit_code == 0, outcome.stderr
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "hf2"))
    biases = [name for name in first if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(first[name].any() for name in biases)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_transformers_loads_what_was_written(meshwright, trained, run_file):
    transformers = pytest.importorskip("transformers")
    assert meshwright("checkpoint", "to-hf", run_file, "hf", "--step", "2").exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("hf")
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "nowhere"), "there is no checkpoint"),
        (("to-hf", "run.yaml"), "to-hf needs two paths"),
        (("from-hf", "saved", "hf"), "needs the run file"),
        (("to-hf", "saved", "hf", "--merge"), "--merge is about adapters"),
        (("show", "saved", "--merge"), "--merge is for to-hf"),
        (("to-hf", "run.yaml", "hf", "--step", "3"), "no checkpoint of this step: got 3, allowed: 2, 4"),
        (("from-hf", "run.yaml", "hf"), "already holds checkpoints"),
        (("show", "saved", "hf"), "takes one path"),
        (("verify", "saved", "--dtype", "fp32"), "--dtype is for to-hf"),
    ],
)
def test_bad_input_is_one_message(meshwright, trained, arguments, words):
    outcome = meshwright("checkpoint", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.stderr


def test_a_damaged_checkpoint_is_not_exported(meshwright, trained, run_file):
    alter(trained / "saved" / "step-00000004")
    outcome = meshwright("checkpoint", "to-hf", run_file, "hf")
    assert outcome.exit_code == 2
    assert "was altered" in outcome.stderr
    assert not (trained / "hf").exists()


def test_without_torch_it_says_how_to_install_it(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: None)
    outcome = meshwright("checkpoint", "show", run_file)
    assert outcome.exit_code == 3
    assert f"hint: {install_command('torch')}" in outcome.stderr


def test_a_step_without_manifest_is_no_whole_checkpoint(meshwright, trained, run_file):
    (trained / "saved" / "step-00000004" / "manifest.json").unlink()
    found = meshwright("checkpoint", "verify", run_file, "--json")
    assert found.exit_code == 1
    assert [c["damage"] for c in found.json["checkpoints"]] == [None, "it has no manifest"]
    assert found.json["last_good"].endswith("step-00000002")
    resumed = meshwright("train", run_file, "--resume")
    assert resumed.exit_code == 2
    assert "step-00000004 is damaged: it has no manifest" in resumed.stderr
    for step in (2, 4):
        (trained / "saved" / f"step-0000000{step}" / "manifest.json").unlink(missing_ok=True)
    assert meshwright("checkpoint", "verify", run_file).exit_code == 1
