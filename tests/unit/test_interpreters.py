"""Interpreters of a version are searched for; tests of MaxText's environment have the locations."""

from __future__ import annotations

import sys

import pytest
from tests.fake_programs import program

from meshwright.interpreters import search_python


@pytest.fixture
def nothing_there(monkeypatch, tmp_path):
    """A machine with Python 3.12 alone, of which nothing is on PATH."""
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "own", "echo 3 12 1")))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


def test_a_newer_one_is_not_suitable(nothing_there):
    found = search_python(oldest=(3, 11), newest=(3, 11))
    assert [(one.location, one.found) for one in found] == [
        ("this Python", "Python 3.12.1"),
        ("python3.11 on PATH", "not there"),
        ("pyenv", "not there"),
        ("uv", "not there"),
    ]
    assert found[-1].python is None
    assert search_python(oldest=(3, 11))[-1].python == nothing_there / "own"


def test_other_versions_of_pyenv_are_not_run(nothing_there):
    root = nothing_there / "pyenv"
    program(nothing_there / "path" / "pyenv", f"echo {root}")
    program(root / "versions" / "3.9.18" / "bin" / "python", "echo 3 13 9")
    wanted = program(root / "versions" / "3.13.0" / "bin" / "python", "echo 3 13 0")
    assert search_python(oldest=(3, 13), newest=(3, 13))[-1].python == wanted


def test_uv_is_asked_for_the_range(nothing_there):
    wanted = program(nothing_there / "uv-python", "echo 3 13 0")
    program(nothing_there / "path" / "uv", f'[ "$3" = ">=3.13,<3.14" ] && echo {wanted}')
    assert search_python(oldest=(3, 13), newest=(3, 13))[-1].python == wanted
