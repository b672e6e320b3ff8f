"""`scripts/rehearse_node.py`: the way to a node without a network, from the bundle to the defaults."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from scripts import rehearse_node
from tests.every_member import check_every

from benchmarks import gpu_apply

ROOT = Path(__file__).parents[1]


@pytest.fixture
def node(tmp_path):
    """A program that answers as a Python with PyTorch, whose import takes a second."""
    path = tmp_path / "node"
    path.write_text("#!/bin/sh\necho 2.13.0\n")
    path.chmod(0o755)
    return str(path)


def test_bad_input_is_refused(tmp_path, capsys, node):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    bare = tmp_path / "bare"
    venv.create(bare)
    cases = {
        (str(tmp_path / "absent"),): "cannot be started",
        (str(bare / "bin" / "python"),): "has no PyTorch",
        (node, "--folder", str(tmp_path / "full")): "is not empty",
        (node, "--folder", str(tmp_path / "full" / "file")): "File exists",
        (node, "--folder", str(tmp_path / "full" / "file" / "below")): "Not a directory",
        (node, "--only", "doctor,nothing"): "no measurement is called nothing",
    }

    def check(arguments):
        with pytest.raises(SystemExit) as ended:
            rehearse_node.main(arguments)
        assert ended.value.code == 2
        assert cases[arguments] in capsys.readouterr().err

    check_every(list(cases), check, name=str)


def test_the_first_step_that_fails_ends_it(tmp_path, monkeypatch, capsys, node):
    taken = []

    def fails(rehearsal):
        rehearsal._run([sys.executable, "-c", "raise SystemExit(3)"])

    steps = {"a": lambda r: taken.append("a"), "b": fails, "c": lambda r: taken.append("c")}
    monkeypatch.setattr(rehearse_node, "STEPS", steps)
    folder = tmp_path / "folder"
    assert rehearse_node.main([node, "--folder", str(folder)]) == 1
    assert taken == ["a"]
    assert "b        failed: exit code 3" in capsys.readouterr().out


@pytest.mark.slow  # it needs an index of packages; each part has tests of its own
def test_the_whole_way(tmp_path):
    """The node has the packages of this environment, and Meshwright from the bundle."""
    pytest.importorskip("torch")
    node = tmp_path / "node"
    venv.create(node, with_pip=True)
    (site,) = node.glob("lib/python*/site-packages")
    (site / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = [sys.executable, "scripts/rehearse_node.py", node / "bin" / "python", "--folder", tmp_path / "way"]
    done = subprocess.run([*script, "--only", "kernels-8b,step-8b"], cwd=ROOT, text=True, capture_output=True)
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("no index of packages can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split() for line in done.stdout.splitlines() if line.split()[0] in rehearse_node.STEPS] == [
        [name, "done"] for name in rehearse_node.STEPS
    ]
    defaults = tomllib.loads((tmp_path / "way" / "applied" / gpu_apply.DEFAULTS).read_text(encoding="utf-8"))
    assert defaults["cpu"]["swiglu"][-1] == "reference"
    assert (tmp_path / "way" / "applied" / gpu_apply.RECORDS / "cpu-cpu" / "kernels-8b" / "kernels.json").is_file()
    assert "A dry run on cpu" in (tmp_path / "way" / "gpu.html").read_text(encoding="utf-8")
