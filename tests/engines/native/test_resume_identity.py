"""`--resume` continues the run of the checkpoint, or says why it is another one."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

QUICK = {"train": "{steps: 4, checkpoint: {folder: saved, every_steps: 2}}"}


@pytest.fixture
def run(tmp_path, tiny_text, meshwright, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(tiny_text)

    def train(*arguments):
        return meshwright("train", "run.yaml", "--out", "out", "--only-steps", "--json", *arguments)

    assert train().exit_code == 0
    return train


def steps(folder):
    return [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


def test_another_run_is_refused_with_every_difference(run, tmp_path):
    before = (tmp_path / "out" / "steps.jsonl").read_bytes()
    others = ("model.num_layers=1", "model.tied_embeddings=true", "model.rope.theta=5.0e5", "train.seed=3")
    found = run("--resume", "--set", "train.steps=6", *(a for o in others for a in ("--set", o)))
    assert found.exit_code == 2
    for line in (
        "model.num_layers: 2 -> 1", "model.tied_embeddings: False -> True", "model.rope.theta: 10000.0 -> 500000.0",
        "train.seed: 0 -> 3", "--branch",
    ):  # fmt: skip
        assert line in found.stderr
    assert "train.steps" not in found.stderr.partition("hint")[0]
    assert (tmp_path / "out" / "steps.jsonl").read_bytes() == before


def test_another_batch_goes_on_in_the_data_and_is_counted_truly(run, tmp_path):
    found = run("--resume", "--set", "train.steps=6", "--set", "batch.global_sequences=8")
    assert found.exit_code == 0, found.stderr
    assert [entry["tokens"] for entry in steps(tmp_path)] == [64, 128, 192, 256, 384, 512]
    assert found.json["statistics"]["tokens"] == 512
    note = next(note for note in found.json["notes"] if "batch.global_sequences: 4 -> 8" in note)
    assert note in found.stderr
    identity = found.json["identity"]
    assert (identity["batches"], identity["sequence_offset"]) == ([[0, 64], [4, 128]], -16)
    assert identity["changes"][-1].startswith("after step 4: ")
    manifest = json.loads((tmp_path / "saved/step-00000006/manifest.json").read_text())
    assert (manifest["tokens"], manifest["identity"]) == (512, identity)
    once_more = run("--resume", "--set", "train.steps=7")
    assert once_more.json["statistics"]["tokens"] == 512 + 64
    assert once_more.json["identity"]["sequence_offset"] == 2 * 4  # 4 x 4 and 2 x 8 sequences before batch 6


def test_a_run_of_so_many_tokens_ends_after_them_in_another_batch_too(run):
    found = run("--resume", "--set", "train={tokens: 500, checkpoint: {folder: saved}}", "--set",
                "batch.global_sequences=8")  # fmt: skip
    assert found.exit_code == 0, found.stderr
    assert (found.json["statistics"]["steps"], found.json["statistics"]["tokens"]) == (6, 512)


def test_an_old_checkpoint_is_read_and_what_it_lacks_is_said(run, tmp_path):
    from meshwright.training.checkpoints.files import sealed

    path = tmp_path / "saved/step-00000004/manifest.json"
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
