"""Fixtures of all tests, and one deterministic Hypothesis profile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.warm import WarmProcess, measure_nothing, start_warm_ranks

from meshwright.catalog import engines
from meshwright.cli import main
from meshwright.errors import InputError

Command = subprocess.Popen[str] | WarmProcess

# Deterministic, and without a deadline: two busy cores must not turn a law into a flaky test.
settings.register_profile(
    "meshwright", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("meshwright")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the terminal or pytest-xdist says."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _no_refusal_allows_what_it_refuses() -> Iterator[None]:
    """Check every `InputError` of every test: the list of allowed values lacks the refused one."""
    init = InputError.__init__

    def checked(self: InputError, *args: Any, got: object = None, allowed: object = None, **kw: Any) -> None:
        if isinstance(got, str | bool) and allowed is not None:
            names = [name.strip(" '\"") for name in re.split(r", | or | and ", str(allowed))]
            assert str(got) not in names, f"{args[0]}: {got!r} is refused, and among what is allowed: {allowed}"
        init(self, *args, got=got, allowed=allowed, **kw)

    InputError.__init__ = checked
    yield
    InputError.__init__ = init


TINY = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4, micro: 2}
precision: bf16
cluster: here
train: {steps: 4, checkpoint: {folder: saved, every_steps: 2}}
"""


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """A run file that trains in a second; one section a line, so that a test can change one."""
    return TINY


@pytest.fixture
def install_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make engines the only installed ones: `install_engines(native="meshwright.engines.native.contract")`."""

    def install(**contracts: str) -> None:
        points = EntryPoints(EntryPoint(name, value, engines.ENTRY_POINTS) for name, value in contracts.items())
        monkeypatch.setattr(engines, "entry_points", lambda **which: points.select(**which))
        engines._installed.cache_clear()

    yield install
    engines._installed.cache_clear()


@pytest.fixture
def engine_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`engine_package("mine", facts="FACTS = 1")`: a package of these modules, importable until the test ends."""
    names = []

    def make(name: str, **modules: str) -> None:
        names.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        for module, text in modules.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit code and output of one command line."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def meshwright(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the whole command line in this process: `meshwright("catalog", "models", "--json").json`."""

    def run(*args: object) -> Outcome:
        capsys.readouterr()  # what the test itself printed before
        exit_code = main.run([str(a) for a in args])
        captured = capsys.readouterr()
        return Outcome(exit_code=exit_code, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture
def one_thread_and_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give a test one thread and a cache of its own: what it computes is small, and its processes share few cores."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test starts are forked from a server that has PyTorch loaded."""
    pytest.importorskip("torch")
    from meshwright.training import processes

    monkeypatch.setattr(processes, "start_processes", start_warm_ranks)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of this test alone: nothing that was measured or built before is in it."""
    folder = tmp_path / "own-cache"
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder))
    return folder


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of this test do not measure the machine before their first step."""
    pytest.importorskip("torch")
    measure_nothing(monkeypatch.setattr)


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshwright train` in this process draws no report, which takes longer than a training of a few steps."""
    monkeypatch.setattr("meshwright.cli.train._write_page", lambda folder: None)


START_AT_ZERO = ("bias", "lora_b.weight")
"""Parameters that are nothing but their updates after the compared steps: up to 1.6e-5 apart with tensor parallelism.

Adam divides a gradient by its size, so elements whose gradient nearly cancels take the rounding error of the large ones
at up to the largest gradient over Adam's epsilon. In other weights the initial value covers that.
"""


@pytest.fixture
def equals_one_process(warm_ranks: None) -> Callable[..., None]:
    """`equals_one_process([(run, plan), ...])`: plans of as many processes give what one process gives.

    A step has two micro-batches, which shows that they are added up; one of stages has the run's.
    """
    from meshwright.engines.native.check import check_plan
    from meshwright.engines.native.rehearsal import TIMEOUT_S, rehearse_each

    def check(runs: Sequence[tuple[Any, Any]], *, tolerance: float = 1e-6, timeout_s: float = TIMEOUT_S) -> None:
        runs = [(_with_two_micro_batches(run, plan), plan) for run, plan in runs]
        for run, plan in runs:
            assert check_plan(plan, run=run) == []
        comparisons = rehearse_each(runs, timeout_s=timeout_s)
        for (_, plan), found in zip(runs, comparisons, strict=True):
            assert found.num_processes == plan.num_devices
            assert found.loss_error < tolerance, found.plan
            assert found.gradient_error < 10 * tolerance, (found.plan, found.gradient_errors)
            for name, error in found.weight_errors.items():
                most = (30 if name.endswith(START_AT_ZERO) else 10) * tolerance
                assert error < most, (found.plan, name, found.weight_errors)
            assert found.losses[-1] != found.losses[0]

    return check


def _with_two_micro_batches(run: Any, plan: Any) -> Any:
    few = 2 * plan.micro_batch * plan.data
    return replace(run, global_batch=min(run.global_batch, few)) if plan.pipeline == 1 else run


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run file in a folder of its own; checkpoints go to `saved`, results to `out`."""

    folder: Path
    text: str

    def start(
        self, *arguments: str, under: tuple[str, ...] | None = None, page: bool = False, script: Path | None = None
    ) -> Command:
        """Start `meshwright train` at the head of a process group, with a sample and a page only if asked for.

        It starts warm (`tests/warm.py`), after `script` if there is one; with `under` a new Python runs that.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(self.text)
        command = ["train", "run.yaml", "--out", "out", "--json", *arguments]
        if not page:
            command.append("--only-steps")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if under is None:
            return WarmProcess(command, folder=self.folder, environment=environment, script=script)
        return subprocess.Popen(
            [sys.executable, *under, *command],
            cwd=self.folder,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def train(
        self, *arguments: str, page: bool = False, script: Path | None = None, limit_s: float = 240
    ) -> dict[str, Any]:
        """Train to the end and return the record."""
        process = self.start(*arguments, page=page, script=script)
        stdout, stderr = process.communicate(timeout=limit_s)
        assert process.returncode == 0, stderr
        return json.loads(stdout)

    def kill(self, process: Command) -> None:
        """SIGKILL, and nothing else: what a lost machine looks like."""
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    def checkpoints(self) -> list[int]:
        """Steps after which a whole checkpoint stands on the disk."""
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("saved/step-*/manifest.json"))

    def steps(self) -> list[dict[str, Any]]:
        """The lines of the step log; a killed process may have left half of the last one."""
        path = self.folder / "out" / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> list[float]:
        """The loss of every step; each step is there once, in order."""
        entries = self.steps()
        assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
        return [entry["loss"] for entry in entries]


def wait_until(condition: Callable[[], object], process: Command) -> None:
    """Look until `condition` holds; fail when the process ends first."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        time.sleep(0.005)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """`unsynced(folder)`: names of what is below `folder` and would not survive a power cut: it was written later."""
    written_ns: dict[int, int] = {}
    fsync = os.fsync

    def sync(handle: int) -> None:
        fsync(handle)
        written_ns[os.fstat(handle).st_ino] = os.fstat(handle).st_mtime_ns

    def names(folder: Path) -> list[str]:
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return [p.name for p in found if written_ns.get(p.stat().st_ino) != p.stat().st_mtime_ns]

    monkeypatch.setattr(os, "fsync", sync)
    return names


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], object], Command], None]:
    """`wait_for(condition, process)`."""
    return wait_until


@pytest.fixture(scope="session")
def tiny_run(tiny_text: str) -> Callable[..., Training]:
    """`tiny_run(folder, optimizer="{...}")`: the tiny run with other sections, in `folder`."""

    def make(folder: Path, **sections: str) -> Training:
        added = "".join(f"{key}: {value}\n" for key, value in sections.items())
        kept = [line for line in tiny_text.splitlines() if line.split(":")[0] not in sections]
        return Training(folder=folder, text="\n".join(kept) + "\n" + added)

    return make
