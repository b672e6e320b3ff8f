"""The prepared measurements of GPUs are commands that this command line takes, of run files that can be read."""

from __future__ import annotations

import random
import tarfile
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
    names = (gpu.RUN_SMALL, gpu.RUN_EIGHT, gpu.RUN_8B, gpu.RUN_MIXTURE)
    small, eight, large, mixture = (runfile.load(tmp_path / name) for name in names)
    assert mixture.model.experts.num_experts == 64
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
    chosen = [fake("a", "raise SystemExit('no such device')"), fake("b", sleeps, timeout_s=3.0), fake("c", "print(7)")]
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
    (tmp_path / "gpu.json").write_text("{")
    assert gpu.written(tmp_path) == []
    assert (tmp_path / "gpu.unreadable").exists()


def test_each_is_begun_where_all_of_its_time_is_left_and_a_shorter_one_takes_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.Step, "command", property(lambda step: ["python", "-c", *step.arguments]))
    chosen = [
        fake("first", "pass", timeout_s=99.0),  # begun with what there is
        fake("long", "pass", timeout_s=30.0),
        fake("short", "pass", timeout_s=5.0),
    ]
    archive = tmp_path / "gpu.tar.gz"

    def call(folder):
        folder.mkdir(exist_ok=True)
        here = {"type": "cpu", "name": "cpu"}
        gpu.take_all(chosen, folder=folder, device=here, total_s=20.0, again=False, archive=archive)
        return [row["name"] for row in gpu.written(folder)]

    assert call(tmp_path / "one") == ["first", "short"]
    (tmp_path / "two").mkdir()
    gpu.unpack(archive, tmp_path / "two")  # on a machine that has forgotten the first call
    assert call(tmp_path / "two") == ["first", "short", "long"]


def test_an_archive_holds_results_before_caches_and_says_what_is_too_large(tmp_path, monkeypatch, capsys):
    folder, archive = tmp_path / "records", tmp_path / "gpu.tar.gz"
    (folder / gpu.CACHES).mkdir(parents=True)
    noise = random.Random(1).randbytes
    for name, size in ((f"{gpu.CACHES}/small", 1000), (f"{gpu.CACHES}/large", 40_000), ("result.csv", 9000)):
        (folder / name).write_bytes(noise(size))
    monkeypatch.setattr(gpu, "ARCHIVE_BYTES", 20_000)
    assert gpu.pack(folder, archive) == [f"{gpu.CACHES}/large"]
    assert archive.stat().st_size < 20_000
    (folder / "trace.json").write_bytes(noise(30_000))
    gpu.pack(folder, archive)
    assert "too large: trace.json" in capsys.readouterr().err
    gpu.unpack(archive, tmp_path / "again")
    assert (tmp_path / "again" / "result.csv").read_bytes() == (folder / "result.csv").read_bytes()
    archive.write_bytes(archive.read_bytes()[:900])
    (tmp_path / "torn").mkdir()
    with pytest.raises((EOFError, tarfile.TarError)):
        gpu.unpack(archive, tmp_path / "torn")
    assert list((tmp_path / "torn").iterdir()) == []


def test_what_a_folder_has_stays_when_an_archive_comes_to_it(tmp_path):
    older, newer, archive = tmp_path / "older", tmp_path / "newer", tmp_path / "gpu.tar.gz"
    for folder, names in ((older, ("doctor", "gemm")), (newer, ("doctor", "step-8b"))):
        folder.mkdir()
        gpu.write(folder, [row(name) | {"of": folder.name} for name in names])
        (folder / "doctor.stdout.txt").write_text(folder.name)
    gpu.pack(older, archive)
    gpu.unpack(archive, newer)
    found = {kept["name"]: kept["of"] for kept in gpu.written(newer)}
    assert found == {"gemm": "older", "doctor": "newer", "step-8b": "newer"}
    assert (newer / "doctor.stdout.txt").read_text() == "newer"
    for text in ("[]", '{"measurements": [5]}', '{"measurements": [{"name": "doctor", "device": null}]}'):
        (newer / "gpu.json").write_text(text)
        assert gpu.written(newer) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--total", "nan"), "--total"),
        (("--budget", "-5"), "--budget"),
        (("--only", ""), "names no measurement"),
        (("--only", "doctr"), "no measurement is called doctr"),
        (("--archive", "none/gpu.tar.gz"), "--archive"),
        (("--from", "none.tar.gz"), "--from: cannot read"),
    ],
)
def test_bad_input_is_found_before_anything_is_measured(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "take", lambda *a, **k: pytest.fail("it is measured"))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--dry-run", "--out", "out", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
