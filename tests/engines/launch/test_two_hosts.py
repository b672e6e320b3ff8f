"""`launch --on local` on two hosts that have names, addresses and a network of their own: one is lost, both go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.engines.launch import two_hosts as hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or ""),
]
TRAIN = "{steps: 60, checkpoint: {folder: saved, every_steps: 10}}"
DEADLINE_S = 240


@pytest.fixture
def pair():
    with hosts.two_hosts() as found:
        yield found


def launch(host, training, *arguments: str) -> subprocess.Popen[str]:
    """The command that a user gives on each host."""
    command = [
        *host.inside, sys.executable, "-m", "meshwright", "launch", "run.yaml", "--on", "local", "--nodes", "2",
        "--rendezvous", "host1:29500", "--out", "out", "--env", f"GLOO_SOCKET_IFNAME={host.interface}", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=training.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def worker_on(host) -> int:
    """The training process of a host."""
    for pid in hosts.processes_of(host):
        if any(word.startswith(b"RANK=") for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            return pid
    pytest.fail(f"nothing trains on {host.name}")


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """Output of the processes, all of which must have ended well."""
    printed = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n---\n".join(printed)
    return printed


@pytest.mark.parametrize("index", [0, 1], ids=["host1", "host2"])
def test_a_worker_is_lost_and_one_restart_brings_both_hosts_back(index, pair, training, undisturbed, wait_for):
    processes = [launch(host, training, "--max-restarts", "1") for host in pair]
    wait_for(training.checkpoints, processes[0])
    os.kill(worker_on(pair[index]), signal.SIGKILL)
    assert "resumed from saved/step-" in ended(*processes)[0]
    assert training.losses() == undisturbed


def test_a_whole_host_is_lost_and_goes_on_when_its_command_is_given_again(pair, training, undisturbed, wait_for):
    first, second = (launch(host, training, "--max-restarts", "2") for host in pair)
    wait_for(training.checkpoints, first)
    for pid in hosts.processes_of(pair[1]):
        os.kill(pid, signal.SIGKILL)
    second.communicate()
    assert "resumed from saved/step-" in ended(first, launch(pair[1], training, "--max-restarts", "2"))[0]
    assert training.losses() == undisturbed


def test_bad_input_ends_both_and_is_the_answer_of_the_one_that_reads_it(pair, training):
    first, second = (launch(host, training, "--max-restarts", "0", "--set", "data.source=nowhere.txt") for host in pair)
    printed = [process.communicate(timeout=DEADLINE_S)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) in ((2, 1), (2, 2)), printed
    assert "nowhere.txt" in printed[0]
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>' not in printed[1]
