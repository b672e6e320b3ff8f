"""The prepared measurements of GPUs are commands that this command line takes, of run files that can be read."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from benchmarks import gpu
from meshwright import runfile
from meshwright.cli.main import group

H200_BYTES, A100_BYTES = 141 * 10**9, 40 * 2**30
STEPS = {step.name: step for step in gpu.steps(budget_s=60.0)}


@pytest.mark.parametrize("name", STEPS)
def test_every_command_parses_and_is_described(name, tmp_path, monkeypatch):
    gpu.write_run_files(tmp_path, memory_bytes=H200_BYTES)
    monkeypatch.chdir(tmp_path)
    assert f" {name}" in gpu.__doc__
    if STEPS[name].module != "meshwright":
        return
    context, command, words = click.Context(group), group, list(STEPS[name].arguments)
    while isinstance(command, click.Group):
        command = command.get_command(context, words.pop(0))
    command.make_context(name, words)  # raises where an option is unknown or lacks its value


@pytest.mark.parametrize(("memory_bytes", "layers"), [(H200_BYTES, 24), (A100_BYTES, 1)])
def test_the_run_files_can_be_read(tmp_path, memory_bytes, layers):
    gpu.write_run_files(tmp_path, memory_bytes=memory_bytes)
    names = (gpu.RUN_SMALL, gpu.RUN_EIGHT, gpu.RUN_8B)
    small, eight, large = (runfile.load(tmp_path / name) for name in names)
    assert small.model.hidden == 2048
    assert (large.model.hidden, large.model.num_layers) == (4096, layers)
    assert eight.model.num_layers == min(8, layers)


def test_the_dry_run_has_the_same_measurements_and_run_files_that_can_be_read(tmp_path):
    assert [step.name for step in gpu.steps(budget_s=1.0, scale=gpu.DRY)] == list(STEPS)
    gpu.write_run_files(tmp_path, memory_bytes=0, is_dry=True)
    assert runfile.load(tmp_path / gpu.RUN_8B).model.hidden == 64


def row(name, exit_code=0, device="H200"):
    return {"name": name, "exit_code": exit_code, "device": {"name": device}}


def test_what_was_never_tried_comes_first_and_what_succeeded_not_again():
    chosen = list(STEPS.values())[:4]
    first, second, third, fourth = (step.name for step in chosen)
    kept = [row(first), row(second, 1), row(third, 0, device="A100")]

    def names(again):
        return [step.name for step in gpu.due(chosen, kept, device={"name": "H200"}, again=again)]

    assert names(False) == [third, fourth, second]
    assert names(True) == [third, fourth, second, first]


def fake(name, text, timeout_s=60.0):
    return gpu.Step(name=name, module="code", arguments=(text,), timeout_s=timeout_s)


def test_a_failure_or_a_limit_ends_one_command_and_what_it_started(tmp_path, monkeypatch):
    """The second starts a process that outlives it, and is past its limit; the third is still taken."""
    monkeypatch.setattr(gpu.Step, "command", property(lambda step: ["python", "-c", *step.arguments]))
    monkeypatch.setattr(gpu, "GRACE_S", 2.0)
    child = tmp_path / "child"
    sleeps = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(99)"
    )
    chosen = [
        fake("a", "raise SystemExit('no such device')"),
        fake("b", sleeps, timeout_s=3.0),
        fake("c", "print(7)"),
    ]
    here = {"type": "cpu", "name": "cpu"}
    assert gpu.take_all(chosen, folder=tmp_path, device=here, total_s=None, again=False) == 1
    found = {r["name"]: r for r in gpu.written(tmp_path)}
    assert found["a"]["exit_code"] == 1
    assert found["a"]["stderr"] == ["no such device"]
    assert found["b"]["exit_code"] == "out of time"
    assert found["c"]["exit_code"] == 0
    assert (tmp_path / "c.stdout.txt").read_text() == "7\n"
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    chosen[0] = fake("a", "pass")
    assert (
        gpu.take_all(chosen, folder=tmp_path, device=here, total_s=1.0, again=False) == 1
    )  # no time is left
    (tmp_path / "gpu.json").write_text("{")
    assert gpu.written(tmp_path) == []
    assert (tmp_path / "gpu.unreadable").exists()
