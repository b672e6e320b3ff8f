"""Training from Python: the same results as the command leaves."""

from __future__ import annotations

import importlib.util
import json

import pytest

import meshwright as mw
from meshwright.api.folders import locked, results_folder
from meshwright.report.documents.json_values import jsonable

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@needs_torch
def test_a_training_returns_its_record(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    done = mw.train(
        "tiny.yaml", out="first", overrides={"train.steps": 3, "train.checkpoint": None}, quiet=True
    )
    assert done.record["ending"] == "done"
    assert len(done.to_frame()) == done.statistics["steps"] == 3
    assert done.to_dict() == jsonable(json.loads((tmp_path / "first" / "record.json").read_text()))
    assert mw.read_record("first").to_dict() == done.to_dict()
    assert (tmp_path / "first" / "report.html").is_file()
    assert "<svg" in done._repr_html_()


def test_without_torch_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.import_module("meshwright.api.train"), "find_spec", lambda name: None)
    with pytest.raises(mw.MissingDependencyError) as caught:
        mw.train("llama3-8b")
    assert caught.value.hint == "pip install 'meshwright[torch]'"


def test_the_processes_of_a_launcher_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mw.InputError, match="need one folder"):
        mw.train("llama3-8b")


def test_the_default_folder_counts_up_and_resumes_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(results_folder("a/b c", resume=False)) == "runs/a-b-c"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    assert str(results_folder("x", resume=False)) == "runs/x-2"
    assert str(results_folder("x", resume=True)) == "runs/x"


def test_two_trainings_do_not_share_a_folder(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(mw.InputError, match="another training"),
        locked(tmp_path),
    ):
        pass
