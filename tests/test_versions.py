"""The script that tests the package with the versions that it declares to support."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import test_versions as versions

from meshwright.interpreters import PythonCandidate

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "test_versions.py"


def case(name: str) -> versions.VersionCase:
    return next(one for one in versions.cases() if one.name == name)


def test_bounds_are_those_of_the_project():
    bounds = versions.declared(extras=("test",))
    assert f"numpy{bounds['numpy']}" in versions.project()["dependencies"]
    assert f"transformers{bounds['transformers']}" in versions.project()["optional-dependencies"]["test"]
    assert "meshwright" not in bounds
    assert versions.requirement("numpy") == f"numpy{bounds['numpy']}"


def test_the_oldest_version_is_the_lower_bound(monkeypatch):
    table = {
        "name": "meshwright",
        "dependencies": ["a>=1.2", "b.c>=0.3.4,<2", "d"],
        "optional-dependencies": {
            "test": ["meshwright[torch]", "e==4.0"], "torch": [], "kernels": ["f>=3.4; sys_platform == 'linux'"],
        },
    }  # fmt: skip
    monkeypatch.setattr(versions, "project", lambda: table)
    assert [versions.oldest(name) for name in "aef"] == ["a==1.2", "e==4.0", "f==3.4"]
    assert versions.oldest("b.c") == "b.c==0.3.4"
    assert versions.requirement("b.c") == "b.c>=0.3.4,<2"
    with pytest.raises(ValueError, match="no lower bound of d"):
        versions.oldest("d")


def test_every_declared_python_has_a_case():
    """The first one's newest packages are those of the default lane."""
    declared = {line for line in versions.project()["classifiers"] if "Python :: 3." in line}
    assert {f"Programming Language :: Python :: 3.{one.python[1]}" for one in versions.cases()} == declared


def test_a_pinned_package_is_asked_for_once():
    wanted = case("transformers-oldest").requirements()
    assert [one for one in wanted if one.startswith("transformers")] == [versions.oldest("transformers")]
    assert versions.requirement("transformers") in case("newest-doing").requirements()


def test_the_planning_half_installs_no_tensor_framework():
    for one in versions.cases():
        if one.half is versions.PLANNING:
            assert not [r for r in one.requirements() if r.startswith(("torch", "transformers"))]


def test_all_selected_tests_are_there():
    selected = {path.removeprefix("--ignore=") for one in versions.cases() for path in one.tests(full=True)}
    assert [path for path in selected if not (ROOT / path).exists()] == []
    assert set(case("torch-oldest").tests(full=False)) < set(case("torch-oldest").tests(full=True))


@pytest.fixture
def no_pip(monkeypatch, tmp_path):
    """`no_pip(needed)`: PyTorch depends on these, and pip fails if it has to install."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(versions, "search_python", lambda **_: [FOUND])
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: None)

    def offer(*needed: str) -> None:
        def pip(python: Path, *arguments: str) -> str:
            if "--dry-run" not in arguments:
                raise versions.CannotRunError("No matching distribution found for torch")
            return json.dumps({"install": [{"metadata": {"name": "torch", "requires_dist": needed}}]})

        monkeypatch.setattr(versions, "pip", pip)

    return offer


FOUND = PythonCandidate(location="here", found="Python 3.12.1", python=Path(sys.executable))


def run(name: str, *, cuda: bool = False) -> versions.CaseResult:
    return versions.run_case(case(name), tests=["none"], processes=0, keep=False, cuda=cuda)


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA packages of PyTorch are for Linux")
def test_cuda_packages_are_not_installed_unasked(no_pip):
    no_pip("filelock", "nvidia-cublas==13", "cuda-bindings<14")
    skipped = run("torch-oldest")
    assert skipped.outcome is versions.Outcome.SKIPPED
    assert "depends on 2 CUDA packages (nvidia-cublas, ...)" in skipped.about
    assert "No matching distribution" in run("torch-oldest", cuda=True).about


def test_what_cannot_be_had_is_skipped_with_the_reason(no_pip, monkeypatch):
    no_pip("filelock")
    absent = run("torch-oldest")
    assert (absent.outcome, absent.about) == (versions.Outcome.SKIPPED, "No matching distribution found for torch")
    old = PythonCandidate(location="this Python", found="Python 3.11.7")
    monkeypatch.setattr(versions, "search_python", lambda **_: [old])
    absent = run("torch-oldest")
    assert absent.outcome is versions.Outcome.SKIPPED
    assert absent.about == "no Python 3.12: this Python: Python 3.11.7"


def test_packages_that_do_not_go_together_are_a_failure(no_pip, monkeypatch):
    def conflict(python: Path, *arguments: str) -> str:
        raise versions.InstallationError("ResolutionImpossible")

    monkeypatch.setattr(versions, "pip", conflict)
    assert run("oldest-planning").outcome is versions.Outcome.FAILED


def test_exit_codes():
    def results(*outcomes: str) -> list[versions.CaseResult]:
        one = case("oldest-planning")
        return [versions.CaseResult(case=one, outcome=versions.Outcome(word), about="", seconds=0) for word in outcomes]

    assert versions.exit_code(results("passed", "skipped")) == 0
    assert versions.exit_code(results("passed", "failed", "skipped")) == 1
    assert versions.exit_code(results("skipped")) == 3


def test_the_list(capsys):
    assert versions.main(["--list", "--only", "oldest-planning"]) == 0
    printed = capsys.readouterr().out
    assert versions.oldest("numpy") in printed
    assert "tests/laws" in printed


@pytest.mark.slow
def test_a_case_from_end_to_end(tmp_path):
    """The cheapest one with few of its tests; each part is tested above without packages."""
    command = [sys.executable, SCRIPT, "--only", "oldest-planning", "--tests", "tests/unit/specs"]
    environment = versions.os.environ | {"MESHWRIGHT_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 3:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("passed")
    assert list(tmp_path.rglob("python")) == []
