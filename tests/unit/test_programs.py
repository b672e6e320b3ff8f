"""Programs are found on PATH, and scripts of packages beside this Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from meshwright.programs import find_program, with_found_program


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program(folder)`: an executable of one name there; Python is in `environment`, and PATH is `system`."""

    def make(folder: str) -> str:
        path = tmp_path / folder / "one-tool"
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    return make


def test_a_script_beside_python_is_found_where_its_folder_is_not_on_path(program):
    assert find_program("one-tool") is None
    script = program("environment")
    assert find_program("one-tool") == script
    assert with_found_program(["one-tool", "-x", "one-tool"]) == [script, "-x", "one-tool"]


def test_path_comes_first(program):
    program("environment")
    system = program("system")
    assert find_program("one-tool") == system


def test_a_path_stays_as_it_is(program):
    path = program("elsewhere")
    assert find_program(path) == path


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="scripts of a system's Python lie beside other programs")
def test_scripts_of_this_environment_are_not_on_the_path_of_tests():
    """`conftest.py` sees to it: what needs one finds it in the way of those who have not activated theirs."""
    folders = [Path(folder).resolve() for folder in os.environ["PATH"].split(os.pathsep) if folder]
    assert Path(sys.prefix, "bin").resolve() not in folders
