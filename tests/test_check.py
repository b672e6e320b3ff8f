"""`.ci/run` in a small repository, and the script that runs it as another processor and beside busy programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import check

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$CI $ONEDNN_MAX_CPU_ISA $*" >> "$LOG"
echo "3 passed, 1 skipped in 0.10s"
[ ! -e "$FAILS" ]
"""
README = """
<!-- ci: test -->
```bash
mkdir -p .venv/bin && cp python .venv/bin && .venv/bin/python -m pytest -q -n 2
```
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose environment has a Python that notes its arguments; it fails where the file `fails` is."""
    root = tmp_path / "repository"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
    (root / "README.md").write_text(README)
    (root / "python").write_text(PYTHON)
    (root / "python").chmod(0o755)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    return root


def runs_of_pytest(root: Path) -> list[str]:
    return (root.parent / "log").read_text().splitlines()


def ci_run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / ".ci" / "run", *arguments], capture_output=True, text=True)


def test_the_whole_has_three_stages(repository):
    before_s = time.time()
    done = ci_run(repository)
    assert done.returncode == 0, done.stderr
    fast, types, slow = runs_of_pytest(repository)
    assert fast == "true  -m pytest -q -n 2"
    assert types == "true  -m pytest -q -n 0 -m slow tests/test_project.py"
    assert slow.startswith("true  -m pytest -q -n 2 -m slow --ignore=tests/test_project.py --until=")
    assert 23.9 * 60 < int(slow.partition("--until=")[2].split()[0]) - before_s < 24.1 * 60
    assert not (repository / ".venv").exists()


def test_until_slow_leaves_out_the_last(repository):
    assert ci_run(repository, "--until-slow").returncode == 0
    assert len(runs_of_pytest(repository)) == 2


def test_the_default_lane_is_the_command_alone_without_ci(repository, monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert ci_run(repository, "--default-lane").returncode == 0
    assert runs_of_pytest(repository) == ["  -m pytest -q -n 2"]


def test_a_failure_ends_it(repository):
    (repository.parent / "fails").touch()
    assert ci_run(repository).returncode != 0
    assert len(runs_of_pytest(repository)) == 1


def test_here_takes_the_folder_itself(repository):
    assert ci_run(repository, "--until-slow", "--here").returncode == 0
    assert (repository / ".venv").exists()


def test_a_hook_with_arguments_of_git(repository, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    assert ci_run(repository, "origin", "somewhere").returncode == 0
    assert len(runs_of_pytest(repository)) == 3


def test_a_worktree_and_a_clone_without_history(repository, tmp_path):
    tree, shallow = tmp_path / "tree", tmp_path / "shallow"
    subprocess.run(["git", "worktree", "add", "-q", tree], cwd=repository, check=True)
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{repository}", shallow], check=True)
    assert [ci_run(root, "--until-slow").returncode for root in (tree, shallow)] == [0, 0]


def test_an_unknown_option_is_refused(repository):
    done = ci_run(repository, "--until-slwo")
    assert done.returncode == 2
    assert "--until-slow" in done.stderr


def test_a_check_prints_each_run(repository, capsys):
    assert check.main(["--profile", "own", "--repeat", "2"], root=repository) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "6 passed, 0 failed, 2 skipped   green" in lines[0]
    assert [line[:4] for line in runs_of_pytest(repository)] == ["true"] * 4


def test_one_failure_fails_a_check(repository, capsys):
    (repository.parent / "fails").touch()
    assert check.main(["--profile", "own"], root=repository) == 1
    assert "RED (exit code 1)" in capsys.readouterr().out


def test_a_profile_sets_what_libraries_read(repository, monkeypatch):
    monkeypatch.setattr(check, "processor_flags", lambda: frozenset({"avx2"}))
    assert check.main([], root=repository) == 0
    assert {line.split()[1] for line in runs_of_pytest(repository)} == {"AVX2"}


def test_counts_of_all_summaries_are_added():
    lines = [
        "1 failed, 9 passed, 2 skipped in 3.21s",
        "3 passed in the meantime",
        "=== 1 passed, 1 error in 61.00s (0:01:01) ===",
    ]
    assert check.count_tests(lines) == {"passed": 10, "failed": 2, "skipped": 2}


def test_profiles_of_a_machine():
    assert check.playable(frozenset()) == ["own"]
    names = check.playable(frozenset({"avx2", "avx512f", "avx512vl"}))
    assert check.chosen(None, names) == ["avx2"]
    assert check.chosen("all", names) == ["avx2", "avx512", "own"]
    assert check.chosen("own", ["own"]) == ["own"]
    with pytest.raises(ValueError, match="this machine can play own"):
        check.chosen("avx2", ["own"])


@pytest.mark.parametrize("option", [["--profile", "none"], ["--busy", "-1"], ["--nice", "20"], ["--repeat", "0"]])
def test_bad_input(option, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(option)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_busy_programs_end_with_the_check_that_fails():
    def fail() -> None:
        with check.busy_programs(2) as programs:
            pids.extend(program.pid for program in programs)
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


WAITS = """#!/bin/sh
echo $$ >> "$LOG"
exec sleep 300
"""


ENDED_BY = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def heard():
    """Started programs hear Ctrl-C and a closed terminal, though a script or nohup may have told this one not to."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {sent: signal.signal(sent, handler) for sent, handler in heard.items()}
    yield
    for sent, handler in before.items():
        signal.signal(sent, handler)


@pytest.fixture
def clones(tmp_path, monkeypatch):
    """The folder in which `.ci/run` clones."""
    folder = tmp_path / "clones"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def waiting(root: Path) -> None:
    """Make the test command one that waits."""
    (root / "python").write_text(WAITS)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-aqm", "waits"], cwd=root, check=True
    )


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("sent", ENDED_BY)
def test_a_run_that_is_ended_leaves_no_process_and_no_clone(repository, sent, wait_for, clones):
    waiting(repository)
    process = subprocess.Popen([repository / ".ci" / "run"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log = repository.parent / "log"
    wait_for(lambda: log.is_file() and log.read_text().endswith("\n"), process)
    assert len(list(clones.iterdir())) == 1
    process.send_signal(sent)  # to it alone
    process.communicate(timeout=60)
    assert process.returncode == 128 + sent
    assert not is_alive(int(log.read_text()))
    assert not list(clones.iterdir())


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("sent", "hears"), [*((sent, True) for sent in ENDED_BY), (signal.SIGTERM, False)])
def test_a_check_that_is_ended_leaves_no_process_and_no_clone(repository, sent, hears, wait_for, clones):
    """Also where Ctrl-C is ignored, as a script does in what it starts in the background."""
    waiting(repository)
    code = (
        "import pathlib, signal, sys; from scripts import check; check.end_with_signals();"
        f"{hears} or signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "check.main(sys.argv[1:-1], root=pathlib.Path(sys.argv[-1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--busy", "1", str(repository)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = repository.parent / "log"
    wait_for(lambda: log.is_file() and log.read_text().endswith("\n"), process)
    busy = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not is_alive(int(log.read_text()))
    assert not any(is_alive(pid) for pid in busy)
    assert not list(clones.iterdir())
