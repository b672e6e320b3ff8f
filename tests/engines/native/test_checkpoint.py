"""Checkpoints: a killed run goes on as if nothing had happened; a damaged one is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright.engines.native import checkpoint  # noqa: E402
from meshwright.errors import InputError  # noqa: E402

TEXT = """
model:
  name: tiny
  hidden: 32
  num_layers: 2
  vocab: 64
  ffn_hidden: 64
  attention: {num_heads: 4, num_kv_heads: 2}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4, micro: 2}
precision: bf16
cluster: here
optimizer: {learning_rate: 1.0e-2, warmup_steps: 3}
train:
  steps: 300
  checkpoint: {folder: saved, every_steps: 50}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(TEXT)
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", "run.yaml", "--out", "out", "--json", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def train(folder: Path, *arguments: str) -> dict[str, object]:
    process = start(folder, *arguments)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def losses(folder: Path) -> list[float]:
    lines = (folder / "out" / "steps.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [e["step"] for e in entries] == list(range(1, len(entries) + 1))
    return [e["loss"] for e in entries]


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline_s
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        time.sleep(0.005)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return losses(folder)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, whole):
    process = start(tmp_path)
    wait_for(lambda: bool(checkpoint.checkpoints(tmp_path / "saved")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(losses(tmp_path)) < len(whole)
    record = train(tmp_path, "--resume")
    assert record["ending"] == "done"
    assert losses(tmp_path) == whole


def test_sigterm_saves_and_stops_and_the_rest_is_the_same(tmp_path, whole):
    slow = ("--set", "train.steps=4000", "--set", "optimizer.schedule=constant")
    process = start(tmp_path, *slow)
    wait_for(lambda: bool(checkpoint.checkpoints(tmp_path / "saved")), process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    record = json.loads(stdout)
    assert record["ending"] == "stopped"
    newest = checkpoint.checkpoints(tmp_path / "saved")[-1]
    assert newest.step == record["statistics"]["steps"] == len(losses(tmp_path))


def saved(folder: Path, step: int, *, keep: int | None = None) -> Path:
    state = {"weights.a": torch.full((64,), float(step)), "exp_avg.a": torch.zeros(64)}
    return checkpoint.save(state, folder=folder, step=step, about={"run": "r"}, keep=keep)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "bytes, was written with"), (alter, "was altered"), (Path.unlink, "is missing")],
)
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(tmp_path, damage, words):
    good, _, bad = (saved(tmp_path, step) for step in (10, 20, 30))
    (tmp_path / "step-00000020" / "manifest.json").write_text("{")  # damaged too
    damage(next(bad.glob("*.distcp")))
    with pytest.raises(InputError) as caught:
        checkpoint.newest(tmp_path)
    assert words in caught.value.message
    assert caught.value.hint is not None
    assert str(good) in caught.value.hint


def test_half_a_checkpoint_is_never_read_and_is_cleared_away(tmp_path):
    saved(tmp_path, 10)
    (tmp_path / ".partial-step-00000020").mkdir()
    assert checkpoint.newest(tmp_path).step == 10
    saved(tmp_path, 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000030"]


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, keep=2)
    assert [c.step for c in checkpoint.checkpoints(tmp_path)] == [2, 3]


def test_what_was_saved_is_loaded(tmp_path):
    saved(tmp_path, 7)
    state = {"weights.a": torch.zeros(64), "exp_avg.a": torch.ones(64)}
    manifest = checkpoint.load(checkpoint.newest(tmp_path), into=state)
    assert manifest["step"] == 7
    assert state["weights.a"].eq(7).all()
    assert state["exp_avg.a"].eq(0).all()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weights.b": torch.zeros(64)}, "has no tensor 'weights.b'"),
        ({"weights.a": torch.zeros(32)}, "another shape"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, state, words):
    saved(tmp_path, 7)
    with pytest.raises(InputError, match=words):
        checkpoint.load(checkpoint.newest(tmp_path), into=state)


def test_a_folder_without_checkpoints_has_none_to_resume_from(tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint.newest(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write a checkpoint"):
        saved(tmp_path / "file" / "below", 1)
