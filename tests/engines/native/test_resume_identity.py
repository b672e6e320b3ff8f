"""`--resume` continues the run of the checkpoint, or says why it is another one."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.warm import measure_nothing

from meshwright.cli import main

pytestmark = pytest.mark.usefixtures("without_measuring")

pytest.importorskip("torch")

QUICK = {"train": "{steps: 4, checkpoint: {folder: saved, every_steps: 2}}"}


TRAIN = ("train", "run.yaml", "--out", "out", "--only-steps", "--json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_text):
    """A folder with the run file, the results and the checkpoints of the run that tests continue, and a copy of it."""
    folder, copy = (tmp_path_factory.mktemp(name) for name in ("trained", "copy"))
    (folder / "run.yaml").write_text(tiny_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        measure_nothing(patch.setattr)
        assert main.run([*TRAIN]) == 0
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return folder, copy


@pytest.fixture
def place(trained, monkeypatch):
    """The folder as the training left it. Checkpoints know where they lie, so it is the same one in every test."""
    folder, copy = trained
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(place, meshwright):
    return lambda *arguments: meshwright(*TRAIN, *arguments)


def steps(folder):
    return [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


def test_another_run_is_refused_with_every_difference(run, place):
    before = (place / "out" / "steps.jsonl").read_bytes()
    others = ("model.num_layers=1", "model.tied_embeddings=true", "model.rope.theta=5.0e5", "train.seed=3")
    found = run("--resume", "--set", "train.steps=6", *(a for o in others for a in ("--set", o)))
    assert found.exit_code == 2
    for line in (
        "model.num_layers: 2 -> 1", "model.tied_embeddings: False -> True", "model.rope.theta: 10000.0 -> 500000.0",
        "train.seed: 0 -> 3", "--branch",
    ):  # fmt: skip
        assert line in found.stderr
    assert "train.steps" not in found.stderr.partition("hint")[0]
    assert (place / "out" / "steps.jsonl").read_bytes() == before


def test_another_batch_goes_on_in_the_data_and_is_counted_truly(run, place):
    found = run("--resume", "--set", "train.steps=6", "--set", "batch.global_sequences=8")
    assert found.exit_code == 0, found.stderr
    assert [entry["tokens"] for entry in steps(place)] == [64, 128, 192, 256, 384, 512]
    assert found.json["statistics"]["tokens"] == 512
    note = next(note for note in found.json["notes"] if "batch.global_sequences: 4 -> 8" in note)
    assert note in found.stderr
    identity = found.json["identity"]
    assert (identity["batches"], identity["sequence_offset"]) == ([[0, 64], [4, 128]], -16)
    assert identity["changes"][-1].startswith("after step 4: ")
    manifest = json.loads((place / "saved/step-00000006/manifest.json").read_text())
    assert (manifest["tokens"], manifest["identity"]) == (512, identity)
    once_more = run("--resume", "--set", "train.steps=7")
    assert once_more.json["statistics"]["tokens"] == 512 + 64
    assert once_more.json["identity"]["sequence_offset"] == 2 * 4  # 4 x 4 and 2 x 8 sequences before batch 6


def test_a_run_of_so_many_tokens_ends_after_them_in_another_batch_too(run):
    found = run("--resume", "--set", "train={tokens: 500, checkpoint: {folder: saved}}", "--set",
                "batch.global_sequences=8")  # fmt: skip
    assert found.exit_code == 0, found.stderr
    assert (found.json["statistics"]["steps"], found.json["statistics"]["tokens"]) == (6, 512)


@pytest.mark.parametrize("length", ["train.steps=3", "train.tokens=190"])
def test_fewer_steps_than_were_taken_are_refused(run, place, length):
    before = (place / "out" / "record.json").read_bytes()
    steps_left = () if "steps" in length else ("--set", "train.steps=null")
    found = run("--resume", "--set", length, *steps_left)
    assert found.exit_code == 2
    assert "its newest checkpoint is from after step 4" in found.stderr
    assert "hint: train.steps=4 or more" in found.stderr
    assert (place / "out" / "record.json").read_bytes() == before


def test_as_many_steps_as_were_taken_are_done(run, place):
    before = json.loads((place / "out" / "record.json").read_text())
    found = run("--resume")
    assert found.exit_code == 0
    assert "nothing is left to do" in found.stderr
    assert json.loads((place / "out" / "record.json").read_text()) == before
    assert found.json["statistics"]["steps"] == 4


def test_an_old_checkpoint_is_read_and_what_it_lacks_is_said(run, place):
    from meshwright.training.checkpoints.files import sealed

    path = place / "saved/step-00000004/manifest.json"
    manifest = json.loads(path.read_text())
    for key in ("identity", "tokens", "manifest_sha256"):
        del manifest[key]
    path.write_text(json.dumps(sealed(manifest)))
    refused = run("--resume", "--set", "train.steps=5", "--set", "model.num_layers=1")
    assert refused.exit_code == 2
    assert "model.num_layers: 2 -> 1" in refused.stderr
    found = run("--resume", "--set", "train.steps=5")
    assert found.exit_code == 0, found.stderr
    assert any("not compared are" in note and "train.seed" in note for note in found.json["notes"])
    assert found.json["statistics"]["tokens"] == 5 * 64


def test_without_a_folder_it_finds_its_own(run, place, meshwright):
    (place / "runs" / "run").mkdir(parents=True)
    found = meshwright("train", "run.yaml", "--resume", "--only-steps", "--json", "--set", "train.steps=6")
    assert found.exit_code == 0, found.stderr
    assert [entry["step"] for entry in steps(place)] == list(range(1, 7))
    assert not list((place / "runs").glob("*/*"))


def test_two_runs_never_mix_in_a_folder(run, place, meshwright):
    before = (place / "out" / "steps.jsonl").read_bytes()
    refused = run("--set", "train.checkpoint=null")
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    other = ("train", "run.yaml", "--out", "two", "--only-steps", "--set", "train.checkpoint.folder=second")
    assert meshwright(*other).exit_code == 0
    mixed = run("--resume", "--set", "train.steps=6", "--set", "train.checkpoint.folder=second")
    assert mixed.exit_code == 2
    assert "is of another run than the checkpoint" in mixed.stderr
    assert (place / "out" / "steps.jsonl").read_bytes() == before
    (place / "out" / "events.jsonl").write_text("{}\n")
    assert run("--force", "--set", "train={steps: 1}").exit_code == 0
    assert len(steps(place)) == 1
    assert not (place / "out" / "events.jsonl").exists()


def test_force_removes_no_checkpoint(run, place):
    refused = run("--force")
    assert refused.exit_code == 2
    assert "--branch" in refused.stderr
    assert len(steps(place)) == 4
    assert (place / "saved" / "step-00000004").is_dir()


def test_a_branch_is_a_new_run_from_the_same_weights(run, place, meshwright):
    before = {path: path.read_bytes() for path in (place / "saved").rglob("*") if path.is_file()}
    branch = ("train", "run.yaml", "--out", "two", "--only-steps", "--json")
    changed = ("--set", "train.seed=5", "--set", "model.rope.theta=20000.0")
    found = meshwright(*branch, "--branch", *changed)
    assert found.exit_code == 0, found.stderr
    origin = found.json["identity"]["branched_from"]
    assert (origin["step"], origin["run"]) == (4, "run")
    assert origin["run_id"] == json.loads((place / "out" / "identity.json").read_text())["run_id"]
    assert found.json["identity"]["run_id"] != origin["run_id"]
    assert found.json["statistics"]["steps"] == 4
    assert sorted(p.name for p in (place / "saved-branch").glob("step-*")) == ["step-00000002", "step-00000004"]
    assert before == {path: path.read_bytes() for path in (place / "saved").rglob("*") if path.is_file()}
    note = next(n for n in found.json["notes"] if n.startswith("a new run from the weights of"))
    assert note in found.stderr
    again = ("--set", "weights=two/start", "--set", "train.checkpoint.folder=saved-branch", "--resume")
    resumed = meshwright(*branch, *changed, *again, "--set", "train.steps=5")
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.json["identity"]["branched_from"] == origin


def test_a_branch_starts_exactly_where_the_run_was(run, place, meshwright):
    """Its first batch has the loss that this batch has with the weights of the checkpoint."""
    from safetensors.torch import load_file

    resumed = ("train", "run.yaml", "--only-steps", "--json")
    frozen = ("--set", "optimizer.learning_rate=1e-12", "--set", "train.steps=1")
    assert meshwright(*resumed, "--out", "two", "--branch", *frozen).exit_code == 0
    assert meshwright("checkpoint", "to-hf", "saved", "hf", "--dtype", "fp32").exit_code == 0
    ours, held = (load_file(place / name / "model.safetensors") for name in ("two/start", "hf"))
    assert ours.keys() == held.keys()
    assert all((ours[name] == held[name]).all() for name in ours)


def test_a_branch_into_another_shape_is_refused(run, place, meshwright):
    found = meshwright("train", "run.yaml", "--out", "two", "--branch", "--set", "model.num_layers=1")
    assert found.exit_code == 2
    assert "model.num_layers: 2 -> 1" in found.stderr
    assert not (place / "two").exists()
    both = meshwright("train", "run.yaml", "--out", "two", "--branch", "--resume")
    assert both.exit_code == 2


def test_a_branch_of_adapters_starts_from_the_merged_weights(run, place, meshwright):
    assert meshwright("checkpoint", "to-hf", "saved", "hf").exit_code == 0
    lora = ("--set", "task=lora", "--set", "weights=hf", "--set", "lora.rank=2")
    first = ("train", "run.yaml", "--out", "tuned", "--only-steps", "--set", "train.checkpoint.folder=adapters")
    assert meshwright(*first, *lora).exit_code == 0
    second = ("train", "run.yaml", "--out", "more", "--only-steps", "--set", "train.checkpoint.folder=adapters")
    found = meshwright(*second, "--branch", "--json")
    assert found.exit_code == 0, found.stderr
    assert found.json["statistics"]["trained_parameters"] == found.json["statistics"]["parameters"]
