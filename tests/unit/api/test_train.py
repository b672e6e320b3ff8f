"""Training from Python: the same results as the command leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright import runfile
from meshwright.api.folders import holds_checkpoints, require_writable, results_folder
from meshwright.engines.folders import locked, training_folders
from meshwright.json_values import jsonable
from meshwright.training.run_identity import RunIdentity, identity_file, new_identity, write_identity

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@needs_torch
def test_a_training_returns_its_record(tmp_path, monkeypatch, tiny_text, without_measuring):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    done = mw.train("tiny.yaml", out="first", overrides={"train.steps": 3, "train.checkpoint": None}, quiet=True)
    assert done.record["ending"] == "done"
    assert len(done.to_frame()) == done.statistics["steps"] == 3
    assert done.to_dict() == jsonable(json.loads((tmp_path / "first" / "record.json").read_text()))
    assert mw.read_record("first").to_dict() == done.to_dict()
    assert (tmp_path / "first" / "report.html").is_file()
    assert "<svg" in done._repr_html_()


def test_without_torch_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.import_module("meshwright.training.cpu_libraries"), "find_spec", lambda name: None)
    with pytest.raises(mw.MissingDependencyError) as caught:
        mw.train("llama3-8b")
    assert re.search(r"^pip install .*'torch>=[\d.]+'", caught.value.hint)


@needs_torch
def test_the_processes_of_a_launcher_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mw.InputError, match="need one folder"):
        mw.train("llama3-8b")


def _named(text: str, name: str) -> mw.Run:
    return runfile.loads(f"name: {name}\n{text}")


def test_the_default_folder_counts_up(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    assert str(results_folder(_named(tiny_text, "a/b c"), resume=False)) == "runs/a-b-c"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    assert str(results_folder(_named(tiny_text, "x"), resume=False)) == "runs/x-2"


def _identified(run: mw.Run, results: Path) -> RunIdentity:
    return new_identity(run, plan=None, results=results, fingerprints={})


def test_a_resumed_run_finds_its_own_folder(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    run = _named(tiny_text, "x")
    assert str(results_folder(run, resume=True)) == "runs/x"  # there is nothing yet
    own, other = _identified(run, Path("elsewhere/first")), _identified(run, Path("runs/x"))
    write_identity(identity_file(Path("saved")), own)
    write_identity(Path("runs/x/identity.json"), other)  # of another run with the same name: newer, but not this one
    assert str(results_folder(run, resume=True)) == "runs/x-2"
    write_identity(Path("elsewhere/first/identity.json"), own)
    assert str(results_folder(run, resume=True)) == "elsewhere/first"
    write_identity(Path("runs/copied/identity.json"), own)
    with pytest.raises(mw.InputError, match="several folders hold results of this run") as caught:
        results_folder(run, resume=True)
    assert "elsewhere/first, runs/copied" in caught.value.message
    shutil.rmtree("elsewhere")  # moved
    assert str(results_folder(run, resume=True)) == "runs/copied"


def test_a_run_of_an_older_release_is_found_by_its_checkpoint_folder(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    for folder, saves in (("x", "saved"), ("x-2", "other")):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        resolved = {"train": {"checkpoint": {"folder": saves}}}
        (tmp_path / "runs" / folder / "resolved.json").write_text(json.dumps(resolved))
    assert str(results_folder(_named(tiny_text, "x"), resume=True)) == "runs/x"


def test_two_trainings_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(mw.InputError, match="another training"), locked(tmp_path):
        pass


def _saving(text: str, folder: object) -> mw.Run:
    return runfile.loads(text, overrides=[f"train.checkpoint.folder={folder}"])


def test_two_trainings_do_not_share_a_checkpoint_folder(tmp_path, tiny_text):
    run = _saving(tiny_text, tmp_path / "saved")
    with (
        training_folders(tmp_path / "one", run),
        pytest.raises(mw.InputError, match="saves its checkpoints there now") as caught,
        training_folders(tmp_path / "two", run),
    ):
        pass
    assert f"process {os.getpid()} since 2" in caught.value.hint
    assert "train.checkpoint.folder=" in caught.value.hint
    assert not (tmp_path / "saved").exists()  # engines look whether it does
    with training_folders(tmp_path / "two", run):  # free again
        pass


def test_only_the_main_process_locks_and_a_restart_goes_on(tmp_path, tiny_text, monkeypatch):
    run = _saving(tiny_text, tmp_path / "saved")
    with training_folders(tmp_path, run):
        monkeypatch.setenv("RANK", "1")
        with training_folders(tmp_path, run):
            pass
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        with training_folders(tmp_path, run):
            pass


def test_a_killed_training_frees_its_checkpoint_folder(tmp_path, tiny_text):
    code = (
        "import sys, time; from pathlib import Path; from meshwright.engines.folders import locked_checkpoints\n"
        "with locked_checkpoints(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    run = _saving(tiny_text, tmp_path / "saved")
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(mw.InputError, match="saves its checkpoints"), training_folders(tmp_path, run):
            pass
        process.kill()
    with training_folders(tmp_path, run):
        pass


def test_a_folder_that_cannot_be_written_is_bad_input_before_anything_is_measured(
    tmp_path, tmp_path_factory, tiny_text
):
    (tmp_path / "file").write_text("")
    run = _saving(tiny_text, tmp_path / "saved")
    with pytest.raises(mw.InputError, match="not a folder"):
        require_writable(tmp_path / "file" / "out", run)
    with pytest.raises(mw.InputError, match="not a folder"):
        require_writable(tmp_path / "out", _saving(tiny_text, tmp_path / "file" / "saved"))
    elsewhere = _saving(tiny_text, tmp_path_factory.mktemp("elsewhere") / "saved")
    with pytest.raises(mw.InputError, match="cannot write there"), training_folders(tmp_path / "file", elsewhere):
        pass
    require_writable(tmp_path / "out", run)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_read_only_folder_is_bad_input(tmp_path, tiny_text, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(mw.InputError, match="cannot write there"):
        require_writable(tmp_path / "out", runfile.loads(tiny_text))


@needs_torch
def test_resume_or_begin_begins_and_then_resumes(tmp_path, monkeypatch, tiny_text, without_measuring):
    """One command, run again and again, as a requeued job runs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    saves = {"train.checkpoint": {"folder": "saved", "every_steps": 2}}
    done = [
        mw.train("tiny.yaml", overrides=saves | {"train.steps": steps}, resume_or_begin=True, quiet=True)
        for steps in (2, 4, 4)
    ]
    assert [d.statistics["steps"] for d in done] == [2, 4, 4]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    (tmp_path / "runs" / "tiny").rename(tmp_path / "old")
    for file in (tmp_path / "saved").iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with pytest.raises(mw.InputError, match="no checkpoint to resume from") as refused:
        mw.train("tiny.yaml", overrides=saves, resume=True, quiet=True)
    assert "--resume-or-begin" in str(refused.value.hint)


@needs_torch
@pytest.mark.parametrize(
    ("asked", "message"),
    [({"resume": True}, "leave one of"), ({"branch": True}, "a branch is a new run"), ({}, "nothing to resume")],
)
def test_resume_or_begin_needs_checkpoints_and_no_other_choice(tiny_text, asked, message):
    run = runfile.loads(tiny_text, overrides=["train.checkpoint=null"])
    with pytest.raises(mw.InputError) as refused:
        mw.train(run, resume_or_begin=True, **asked)
    assert message in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("step-00000010", True), ("step-3", True), ("run/checkpoints/12", True), (".partial-step-00000010", False),
        (".lock", False), ("identity.json", False), ("step-", False),
    ],
)  # fmt: skip
def test_checkpoints_of_every_engine_are_seen(tmp_path, name, is_one):
    assert not holds_checkpoints(tmp_path / "nowhere")
    (tmp_path / name).mkdir(parents=True)
    assert holds_checkpoints(tmp_path) == is_one
