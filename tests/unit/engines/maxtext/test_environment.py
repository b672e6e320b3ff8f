"""The environment that MaxText lives in: which Python is taken, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.fake_programs import program

from meshwright.engines.maxtext import VERSION, environment
from meshwright.errors import MeshwrightError, MissingDependencyError


@pytest.fixture
def nothing_there(monkeypatch, tmp_path):
    """A machine whose own Python is too old, with nothing on PATH."""
    monkeypatch.setattr(environment.sys, "executable", str(program(tmp_path / "old", "echo 3 11 7")))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


def test_where_none_is_found_it_says_where_it_looked_and_what_to_do(nothing_there):
    program(nothing_there / "path" / "python3.12", "exit 1")  # as pyenv's shims do without a version
    with pytest.raises(MissingDependencyError) as error:
        environment.choose_python()
    words = str(error.value)
    assert "this Python: Python 3.11.7" in words
    assert "python3.12 on PATH: " in words
    assert "does not run" in words
    assert "python3.13 on PATH: not there" in words
    assert "pyenv: not there; uv: not there" in words
    assert "uv python install 3.12" in words
    assert "--python PATH" in words


def test_versions_of_pyenv_are_tried(nothing_there):
    root = nothing_there / "pyenv"
    program(nothing_there / "path" / "pyenv", f"echo {root}")
    program(root / "versions" / "3.11.2" / "bin" / "python", "echo 3 11 2")
    wanted = program(root / "versions" / "3.12.1" / "bin" / "python", "echo 3 12 1")
    assert environment.choose_python() == wanted


def test_uv_is_asked_last(nothing_there):
    wanted = program(nothing_there / "uv-python", "echo 3 13 0")
    program(nothing_there / "path" / "uv", f"echo {wanted}")
    assert environment.choose_python() == wanted


def test_a_python_that_is_named_must_do(nothing_there):
    with pytest.raises(MissingDependencyError, match=r"--python .*: Python 3\.11\.7"):
        environment.choose_python(str(nothing_there / "old"))


FAKE = """
case "$1$2" in
  -mvenv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  -mpip) [ "$3" = --version ] && exit 0; echo "$@" >> "$LOG"; [ -e "$FAILS" ] && exit 1; exit 0;;
  -cimport*) case "$2" in *version_info*) echo 3 12 1;; esac; exit 0;;
esac
exit 0
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A Python that makes environments and installs nothing, but notes what was asked for."""
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    return str(program(tmp_path / "python", FAKE))


def test_it_counts_as_made_when_its_mark_is_written(fake, tmp_path):
    folder = tmp_path / "cache" / "environment"
    (tmp_path / "fails").touch()
    with pytest.raises(MeshwrightError, match="ended with exit code 1"):
        environment.create(folder, python=fake)
    assert environment.find(folder) is None
    (tmp_path / "fails").unlink()
    assert environment.create(folder, python=fake, jax="cuda12") == folder / "bin" / "python"
    assert environment.find(folder) == folder / "bin" / "python"
    installed = (tmp_path / "log").read_text()
    assert f"maxtext=={VERSION}" in installed
    assert "jax[cuda12]>=" in installed
    assert "tensorflow" not in installed
    before = installed.count("\n")
    environment.create(folder, python=fake)  # it is there: nothing is done
    assert (tmp_path / "log").read_text().count("\n") == before


def test_one_of_another_version_is_not_taken(fake, tmp_path):
    folder = tmp_path / "environment"
    environment.create(folder, python=fake)
    (folder / environment.MARK).write_text('{"maxtext": "0.1.0"}')
    assert environment.find(folder) is None


def test_the_command(fake, tmp_path):
    command = [sys.executable, "-m", "meshwright.engines.maxtext.environment"]
    made = subprocess.run(
        [*command, "--python", fake, str(tmp_path / "there")], capture_output=True, text=True, env=os.environ
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(tmp_path / "there" / "bin" / "python")
    assert "MESHWRIGHT_MAXTEXT=" in made.stderr
    lacks = subprocess.run(
        [*command, "--python", "no-such-python", str(tmp_path / "other")], capture_output=True, text=True
    )
    assert lacks.returncode == 3
    assert "error: MaxText" in lacks.stderr
    assert "Traceback" not in lacks.stderr


def test_without_it_training_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(MissingDependencyError, match="needs an environment of its own") as error:
        environment.require()
    assert error.value.hint == "python -m meshwright.engines.maxtext.environment"
