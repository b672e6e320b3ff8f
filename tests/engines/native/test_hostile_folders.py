"""Kills while evaluating and saving, under each optimizer, and folders that are symbolic links: no trace is left."""

from __future__ import annotations

import random
import signal
import time

import pytest
from tests.killing import kill_group

pytest.importorskip("torch")

SAVES = "{steps: 40, checkpoint: {folder: saved, every_steps: 1, keep: 2, keep_best: true}"
MODEL = (
    "{name: tiny, hidden: 32, num_layers: 2, vocab: 512, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}"
)


@pytest.fixture
def texts(tmp_path):
    for name, letters in (("train", "abcdefgh"), ("web", "abc"), ("code", "fgh")):
        rng = random.Random(name)
        (tmp_path / f"{name}.txt").write_text("".join(rng.choices(letters, k=20_000)))
    return tmp_path


def killed_often(training, wait_for, *, kills: int, seed: int) -> None:
    """Start and kill, each time some steps later than the last; then train to the end."""
    chance = random.Random(seed)
    for _ in range(kills):
        saved = training.checkpoints()
        process = training.start(*(("--resume",) if saved else ()))
        wait_for(lambda saved=saved: training.checkpoints()[-1:] > saved[-1:], process)
        time.sleep(chance.uniform(0.0, 0.3))
        kill_group(process)
    training.train("--resume")


@pytest.mark.slow  # the fast lane kills runs that save, and resumes runs that evaluate
def test_kills_while_evaluating_several_sources_and_saving_leave_no_trace(tiny_run, texts, wait_for):
    """Each step saves, and evaluates two sources for longer than it trains."""
    sections = {
        "model": MODEL,
        "data": f"{{source: {texts / 'train.txt'}, tokenizer: bytes, sequence_length: 16, "
        f"validation: {{web: {texts / 'web.txt'}, code: {texts / 'code.txt'}}}}}",
        "train": SAVES + ", evaluate: {every_steps: 1, num_batches: 12, best_by: code, patience: 100}}",
    }
    whole, cut = (tiny_run(texts / name, **sections) for name in ("whole", "cut"))
    expected = whole.train()
    killed_often(cut, wait_for, kills=5, seed=2)
    kept = ("step", "batch", "loss", "validation_loss", "validation_losses")
    assert [[e[k] for k in kept] for e in cut.steps()] == [[e[k] for k in kept] for e in whole.steps()]
    assert cut.checkpoints() == whole.checkpoints()
    found = cut.train("--resume")
    assert found["statistics"]["best"]["step"] == expected["statistics"]["best"]["step"]
    assert found["statistics"]["best"]["loss"] == expected["statistics"]["best"]["loss"]


@pytest.mark.slow  # `test_optimizers_by_name` resumes each after an orderly end
@pytest.mark.parametrize("name", ["adamw8bit", "lion", "muon"])
def test_every_optimizer_continues_after_kills_bit_for_bit(tiny_run, tmp_path, wait_for, name):
    sections = {
        "optimizer": f"{{name: {name}, learning_rate: 1.0e-2}}",
        "train": "{steps: 60, checkpoint: {folder: saved, every_steps: 5, keep: 3}}",
    }
    whole, cut = (tiny_run(tmp_path / part, **sections) for part in ("whole", "cut"))
    whole.train()
    killed_often(cut, wait_for, kills=3, seed=3)
    assert cut.losses() == whole.losses()


def test_a_folder_has_one_lock_by_whatever_path(tiny_run, tmp_path, wait_for, meshwright, monkeypatch):
    """Another training that names the same folders through symbolic links is refused while the first one runs."""
    first = tiny_run(tmp_path / "real", train="{steps: 100000, checkpoint: {folder: saved, every_steps: 50}}")
    process = first.start()
    wait_for(first.checkpoints, process)
    process.send_signal(signal.SIGSTOP)  # it keeps its locks, and leaves the processor to the others
    (tmp_path / "saved-link").symlink_to(tmp_path / "real" / "saved")
    (tmp_path / "out-link").symlink_to(tmp_path / "real" / "out")
    (tmp_path / "parent").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    try:
        for folder in ("saved-link", "parent/saved", "real/../parent/saved"):
            again = meshwright(
                "train", "real/run.yaml", "--out", "other", "--resume", "--set", f"train.checkpoint.folder={folder}"
            )
            assert again.exit_code == 2, again.stderr
            assert "another training saves its checkpoints there now" in again.stderr
        for folder in ("out-link", "parent/out"):
            again = meshwright("train", "real/run.yaml", "--out", folder, "--force", "--set", "train.checkpoint=null")
            assert again.exit_code == 2, again.stderr
            assert "another training writes there now" in again.stderr
        assert process.poll() is None
    finally:
        kill_group(process)
    assert not (tmp_path / "other").exists()


def test_links_to_folders_are_folders(tiny_run, tmp_path, monkeypatch, without_measuring, meshwright):
    """Results and checkpoints go where links point, which stay links; one that points to nothing is refused."""
    for name in ("saved", "out"):
        (tmp_path / f"real-{name}").mkdir()
        (tmp_path / name).symlink_to(tmp_path / f"real-{name}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(tiny_run(tmp_path).text)
    command = ("train", "run.yaml", "--only-steps", "--json")
    assert meshwright(*command, "--out", "out").exit_code == 0
    found = meshwright(*command, "--resume", "--set", "train.steps=6", "--out", "real-out")
    assert found.exit_code == 0, found.stderr
    assert found.json["statistics"]["steps"] == 6
    assert (tmp_path / "saved").is_symlink()
    assert (tmp_path / "real-saved" / "step-00000006").is_dir()
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for arguments in (
        ("--out", "lost", "--set", "train.checkpoint=null"),
        ("--out", "new", "--set", "train.checkpoint.folder=lost"),
    ):
        refused = meshwright(*command, *arguments)
        assert refused.exit_code == 2, refused.stderr
        assert "lost" in refused.stderr
        assert "internal error" not in refused.stderr
