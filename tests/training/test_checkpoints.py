"""Checkpoints: a killed run goes on as if nothing had happened; a damaged one is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.tiny_runs import SMALLEST

torch = pytest.importorskip("torch")

from meshwright.errors import InputError, NewerFormatError
from meshwright.files import swap_names
from meshwright.specs.run import Checkpoint
from meshwright.training import checkpoints as checkpoint
from meshwright.training import run_identity
from meshwright.training.checkpoints import files as checkpoint_files


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
    ("damage", "words"), [(truncate, "bytes, was written with"), (alter, "was altered"), (Path.unlink, "is missing")]
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(tmp_path, damage, words, name):
    good, _, bad = (saved(tmp_path, step) for step in (10, 20, 30))
    (tmp_path / "step-00000020" / "manifest.json").write_text("{")  # damaged too
    damage(bad / name)
    with pytest.raises(InputError) as caught:
        checkpoint.newest(tmp_path)
    assert words in caught.value.message
    assert caught.value.hint is not None
    assert str(good) in caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "was altered"),
        ('{"step": 3, "files": {}}', "was altered"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, content, words):
    good, bad = saved(tmp_path, 10), saved(tmp_path, 20)
    (bad / "manifest.json").write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        checkpoint.newest(tmp_path)
    assert str(good) in str(caught.value.hint)
    if not content.startswith("{"):  # nor is the step of the best checkpoint read from it
        with pytest.raises(InputError, match="manifest of checkpoint"):
            checkpoint_files.best_step(tmp_path)


def test_a_checkpoint_of_a_newer_meshwright_is_refused_and_is_not_damaged(tmp_path):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["format"] == 1
    path.write_text(json.dumps(manifest | {"format": 2}))
    for read in (checkpoint.newest, lambda folder: checkpoint.verify(path.parent), run_identity._newest_manifest_in):
        with pytest.raises(NewerFormatError, match=r"step-00000002: unknown format: got 2, allowed: 1"):
            read(tmp_path)
    del manifest["format"], manifest["manifest_sha256"]
    path.write_text(json.dumps(checkpoint_files.sealed(manifest)))
    assert checkpoint.newest(tmp_path).step == 2


def test_an_altered_step_in_a_manifest_is_noticed(tmp_path):
    path = saved(tmp_path, 10) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(InputError, match="manifest was altered"):
        checkpoint.newest(tmp_path)


def test_half_a_checkpoint_is_never_read_and_is_cleared_away(tmp_path):
    saved(tmp_path, 10)
    (tmp_path / ".partial-step-00000020").mkdir()
    assert checkpoint.newest(tmp_path).step == 10
    saved(tmp_path, 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000030"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, unsynced):
    """Its files are synced where they are summed, whoever wrote them."""
    assert unsynced(saved(tmp_path, 1)) == []
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "ranges.json").write_text("{}")
    assert unsynced(foreign) == ["ranges.json"]
    checkpoint_files.digests(foreign, iter(["ranges.json"]))
    assert unsynced(foreign) == []


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, keep=2)
    assert [c.step for c in checkpoint.checkpoints(tmp_path)] == [2, 3]


def test_a_checkpoint_that_was_moved_and_linked_is_removed_by_its_link(tmp_path):
    place = saved(tmp_path / "run", 1)
    moved = place.rename(tmp_path / "moved")
    place.symlink_to(moved)
    for step in (2, 3):
        saved(tmp_path / "run", step, keep=1)
    assert [c.step for c in checkpoint.checkpoints(tmp_path / "run")] == [3]
    assert checkpoint.files.verify(moved) is None  # somebody put it there


@pytest.mark.parametrize("swaps", [True, False])
def test_a_step_that_is_saved_again_stands_until_its_successor_does(tmp_path, monkeypatch, swaps):
    if not swaps:  # a file system that cannot
        monkeypatch.setattr(checkpoint.files, "swap_names", lambda one, other: False)
    saved(tmp_path, 1)
    monkeypatch.setattr(checkpoint.files.shutil, "rmtree", lambda path: None)  # killed before anything is removed
    saved(tmp_path, 1)
    assert checkpoint.newest(tmp_path).step == 1
    monkeypatch.undo()
    saved(tmp_path, 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]


def test_a_step_that_is_saved_again_is_never_absent(tmp_path, monkeypatch):
    final = saved(tmp_path, 1)
    if not swap_names(final, final):
        pytest.skip("this file system swaps no names")

    rename = Path.rename

    def renamed(path, target):
        assert final not in (path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    assert saved(tmp_path, 1) == final
    assert [p.name for p in tmp_path.iterdir()] == [final.name]


def test_what_was_saved_is_loaded(tmp_path):
    saved(tmp_path, 7)
    state = {"weights.a": torch.zeros(64), "exp_avg.a": torch.ones(64)}
    manifest = checkpoint.load(checkpoint.newest(tmp_path), into=state)
    assert manifest["step"] == 7
    assert state["weights.a"].eq(7).all()
    assert state["exp_avg.a"].eq(0).all()


@pytest.mark.parametrize(
    ("state", "words"),
    [({"weights.b": torch.zeros(64)}, "has no tensor 'weights.b'"), ({"weights.a": torch.zeros(32)}, "another shape")],
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


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_leaves_the_older_checkpoints_as_they_were(tiny_disk):
    good = saved(tiny_disk, 10)
    state = {"weights.a": torch.zeros(2**18)}  # a megabyte
    with pytest.raises(InputError, match="No space left on device") as caught:
        checkpoint.save(state, folder=tiny_disk, step=20, about={}, keep=1)
    assert "older checkpoints are untouched" in str(caught.value)
    assert checkpoint.newest(tiny_disk).path == good
    saved(tiny_disk, 30)  # what the failed one left is cleared away first
    assert [c.step for c in checkpoint.checkpoints(tiny_disk)] == [10, 30]


def test_a_run_whose_disk_fills_says_so_and_goes_on_when_there_is_room(tiny_run, tmp_path, tiny_disk):
    """The states fit once: two whole checkpoints and a third on its way do not."""
    train = f"{{steps: 40, checkpoint: {{folder: {tiny_disk}, every_steps: 5, keep: KEEP}}}}"
    training = tiny_run(tmp_path / "run", train=train.replace("KEEP", "9"))
    process = training.start()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2, stderr
    assert f"cannot write a checkpoint below {tiny_disk}: No space left on device" in stderr
    steps = [c.step for c in checkpoint.checkpoints(tiny_disk)]
    assert steps
    assert all(checkpoint.verify(c.path) is None for c in checkpoint.checkpoints(tiny_disk))
    assert steps[-1] + 5 <= len(training.losses()) < 40  # noticed in the step after it failed, not at the end
    subprocess.run(["mount", "-o", "remount,size=64m", tiny_disk], check=True)
    assert training.train("--resume")["statistics"]["steps"] == 40
    assert [entry["batch"] for entry in training.steps()] == list(range(40))


@pytest.mark.when_touched  # test_a_run_whose_disk_fills_says_so_and_goes_on_when_there_is_room has no room either
def test_a_log_that_cannot_grow_ends_the_run_and_leaves_the_checkpoints(tiny_run, tmp_path, tiny_disk):
    (tiny_disk / "others").write_bytes(bytes(384 * 1024))  # so that it fills in a few hundred steps
    train = "{steps: 100000, checkpoint: {folder: saved, every_steps: 50}}"
    training = tiny_run(tmp_path / "run", **SMALLEST, train=train)
    process = training.start("--out", str(tiny_disk / "out"))
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 2, stderr
    assert "steps.jsonl: No space left on device" in stderr
    assert training.checkpoints()
    assert not list((tmp_path / "run" / "saved").glob(".*"))  # the one on its way became whole


@pytest.fixture
def saver(tmp_path):
    return checkpoint.CheckpointSaver(Checkpoint(folder=str(tmp_path / "saved"), keep=2), num_ranks=1)


def test_the_background_writes_what_the_states_were(saver, tmp_path):
    """The next steps move the tensors while the copy is being written."""
    weights = torch.zeros(1000)
    for step in (1, 2, 3):
        weights.fill_(step)
        saver.save({"weights.a": weights}, step=step, about={"step_was": step})
        weights.fill_(-1.0)
    saver.wait()
    assert (saver.num_saved, saver.newest) == (3, tmp_path / "saved" / "step-00000003")
    for found in checkpoint.checkpoints(tmp_path / "saved"):
        manifest = checkpoint.load(found, into={"weights.a": weights})
        assert weights.eq(found.step).all()
        assert manifest["step_was"] == found.step
    assert [c.step for c in checkpoint.checkpoints(tmp_path / "saved")] == [2, 3]


def test_what_fails_in_the_background_is_raised_in_the_loop(saver, tmp_path):
    (tmp_path / "saved").write_text("a file")
    saver.save({"weights.a": torch.zeros(8)}, step=1, about={})
    with pytest.raises(InputError, match="cannot write a checkpoint"):
        saver.wait()
    saver.wait()  # said once
    assert saver.newest is None


def test_a_checkpoint_that_is_being_removed_loses_its_name_first(tmp_path, monkeypatch):
    """A process killed while it prunes leaves no half of a checkpoint that looks whole."""
    saved(tmp_path, 1)
    monkeypatch.setattr(checkpoint.files.shutil, "rmtree", lambda path: None)  # killed before anything is removed
    saved(tmp_path, 2, keep=1)
    assert [c.step for c in checkpoint.checkpoints(tmp_path)] == [2]
    monkeypatch.undo()
    saved(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
