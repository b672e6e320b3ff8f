"""The contract of engines: how one is found, and what its launch is. No engine runs here."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.catalog.lookup import engine_names
from meshwright.engines import base
from meshwright.errors import InputError, MissingDependencyError, UnknownNameError

PINNED = "parallel={data_shard: 2, sharding: parameters}"


def test_this_installation_names_its_own_engine():
    assert "native" in engine_names()
    assert base.find_engine("native").__name__ == "meshwright.engines.native.contract"


def test_every_engine_has_what_the_contract_asks():
    asked = [name for name in vars(base.TrainingEngine) if not name.startswith("_")]
    assert asked == ["check", "lower", "prepare", "expected", "launch", "read"]
    for name in engine_names():
        engine = base.find_engine(name)
        assert [f for f in asked if not callable(getattr(engine, f, None))] == []


def test_an_engine_of_another_package_is_found_by_its_entry_point(monkeypatch, install_engines):
    other = types.ModuleType("other_engine")
    monkeypatch.setitem(sys.modules, "other_engine", other)
    install_engines(other="other_engine")
    assert base.find_engine("other") is other
    with pytest.raises(UnknownNameError, match="unknown engine"):
        base.find_engine("othr")


def test_a_source_tree_without_its_metadata_says_so(install_engines):
    install_engines()
    with pytest.raises(MissingDependencyError, match="names no engines"):
        base.find_engine("native")


def test_native_lowers_to_its_own_command_with_the_plan_pinned(tiny_text):
    run = runfile.loads(tiny_text, overrides=[PINNED])
    folder = Path("runs/first")
    launch = base.find_engine("native").lower(run, folder=folder)
    assert launch.argv == ("python", "-m", "meshwright", "train", "runs/first/run.yaml", "--out", "runs/first")
    assert launch.num_processes == 2
    again = runfile.loads(launch.files["run.yaml"])
    assert again.plan == run.plan
    assert again.overrides == ()
    assert base.find_engine("native").lower(run, folder=folder) == launch


def test_nothing_is_lowered_without_a_plan_or_against_a_check(tiny_text):
    native = base.find_engine("native")
    with pytest.raises(InputError, match="parallel is auto"):
        native.lower(runfile.loads(tiny_text), folder=Path("out"))
    with pytest.raises(InputError, match="nvfp4 is not trained"):
        native.lower(runfile.loads(tiny_text, overrides=[PINNED, "precision=nvfp4"]), folder=Path("out"))
