"""Several processes: a lost one is replaced, a stopped run stops everywhere, another plan goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from tests.tiny_runs import SMALLEST

pytest.importorskip("torch")

SECTIONS = {
    "model": SMALLEST["model"],
    "precision": "fp32",
    "parallel": "{data_shard: 2, sharding: parameters}",
    "optimizer": "{learning_rate: 1.0e-3, schedule: constant}",
    "train": "{steps: 40, checkpoint: {folder: saved, every_steps: 10}}",
}


@pytest.fixture
def training(tmp_path, tiny_run):
    return tiny_run(tmp_path, **SECTIONS)


def workers_of(pid: int) -> list[int]:
    """Child processes that train, and not the tracker of shared resources."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if "resource_tracker" not in Path(f"/proc/{c}/cmdline").read_text()]


def is_running(pid: int) -> bool:
    """False for a process that has ended and that its new parent has not waited for."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
def test_a_lost_process_is_replaced_and_the_run_goes_on(training, wait_for):
    process = training.start("--max-restarts", "1")
    wait_for(training.checkpoints, process)
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "was lost" in stderr
    assert json.loads(stdout)["statistics"]["steps"] == 40
    assert len(training.losses()) == 40


def leave_a_file(rank: int, world_size: int, folder: Path) -> None:
    (folder / f"rank {rank} of {world_size}").touch()


@pytest.mark.distributed
def test_processes_start_from_nothing(monkeypatch, tmp_path):
    """As users' do; those of other tests are forked where PyTorch is loaded."""
    from torch.multiprocessing.spawn import start_processes

    from meshwright.training import processes

    monkeypatch.setattr(processes, "start_processes", start_processes)
    processes.run_ranks(leave_a_file, tmp_path, num_ranks=2, device_type="cpu")
    assert {f.name for f in tmp_path.iterdir()} == {"rank 0 of 2", "rank 1 of 2"}


def wait_for_all(rank: int, world_size: int, payload: None) -> None:
    raise AssertionError("the group has a rank that never starts")


def test_a_signal_between_two_starts_leaves_no_rank(monkeypatch):
    """Python waits at its exit for processes that it started, and these wait for the rank that never comes."""
    from torch.multiprocessing.spawn import start_processes

    from meshwright.errors import Terminated
    from meshwright.training import processes

    def start_one(function, args, **options):
        # A rank that is forked has all that it needs; one that is spawned may fail as its queue is gone.
        start_processes(function, args, **options | {"nprocs": 1, "start_method": "fork"})
        raise Terminated

    monkeypatch.setattr(processes, "start_processes", start_one)
    with pytest.raises(Terminated):
        processes.run_ranks(wait_for_all, None, num_ranks=2, device_type="cpu")
    left = multiprocessing.active_children()
    for process in left:
        process.join(timeout=5)
    is_left = [process.is_alive() for process in left]
    for process in left:
        process.kill()
    assert not any(is_left)


def test_hosts_that_would_not_meet_again_are_refused_before_they_lose_anybody(monkeypatch):
    from meshwright.errors import InputError
    from meshwright.training.processes import run_ranks

    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(InputError, match="count their restarts separately") as caught:
        run_ranks(print, None, num_ranks=2, device_type="cpu")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(caught.value.hint)


def leave_early(rank: int, world_size: int, how: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        os._exit(0) if how == 0 else os.kill(os.getpid(), how)
    dist.all_reduce(torch.ones(1))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "reason"), [(0, "exit code 0 before its work was done"), (signal.SIGSEGV, "SIGSEGV ended it")]
)
def test_the_process_that_was_lost_is_named_and_not_those_that_lost_it(how, reason):
    from meshwright.training.processes import WorkerLostError, run_ranks

    begun_s = time.monotonic()
    with pytest.raises(WorkerLostError, match=f"process 1 of 2 was lost: .*{reason}"):
        run_ranks(leave_early, how, num_ranks=2, device_type="cpu")
    assert time.monotonic() - begun_s < 60  # not the timeout of a collective


@pytest.mark.distributed
def test_an_error_that_is_written_in_part_is_no_error_of_the_program(monkeypatch):
    """A process that is ended as it writes its error leaves an empty file, which PyTorch reads."""
    from torch.multiprocessing.spawn import ProcessContext, ProcessException

    from meshwright.training.processes import WorkerLostError, run_ranks

    def join(context: ProcessContext, **options: float) -> bool:
        try:
            return whole(context, **options)
        except ProcessException:
            raise EOFError from None

    whole = ProcessContext.join
    monkeypatch.setattr(ProcessContext, "join", join)
    with pytest.raises(WorkerLostError, match=r"process 1 of 2 was lost: .*exit code 0"):
        run_ranks(leave_early, 0, num_ranks=2, device_type="cpu")


def fail(rank: int, world_size: int, payload: None) -> None:
    from meshwright.errors import InputError

    raise InputError("no room")


@pytest.mark.distributed
def test_processes_that_fail_leave_no_temporary_files(tmp_path, monkeypatch):
    from meshwright.errors import InputError
    from meshwright.training.processes import run_ranks

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InputError, match="no room"):
        run_ranks(fail, None, num_ranks=2, device_type="cpu")
    left = [p.name for p in tmp_path.iterdir() if not p.name.startswith("pymp-")]  # of this process, until it ends
    assert left == []


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks processes up in /proc")
@pytest.mark.when_touched  # the last test starts processes from nothing
@pytest.mark.parametrize("pause_s", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_workers_whose_starter_is_killed_never_train_beside_the_next_training(training, pause_s):
    """They may still import then. The next one waits for them; its steps are those of one training."""
    first = training.start(under=("-m", "meshwright"))
    while len(orphans := workers_of(first.pid)) < 2:
        assert first.poll() is None, first.communicate()
        time.sleep(0.005)
    time.sleep(pause_s)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    for pipe in (first.stdout, first.stderr):
        pipe.close()  # unread: the workers have them, too
    assert any(map(is_running, orphans))
    assert training.train()["statistics"]["steps"] == 40
    assert not any(map(is_running, orphans))
    assert len(training.losses()) == 40
