"""A process is bound to the processors near its device, and becomes the command behind it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshwright.engines import bound


@pytest.fixture
def near(tmp_path, monkeypatch):
    """`near(numa_node, cpulist)` of a device of a machine that allows processors 0 to 7."""
    monkeypatch.setattr(bound, "PCI", tmp_path / "pci")
    monkeypatch.setattr(bound, "NUMA_NODES", tmp_path / "node")
    monkeypatch.setattr(bound.os, "sched_getaffinity", lambda pid: set(range(8)))

    def look(numa_node, cpulist):
        files = {"pci/0000:05:00.0/numa_node": numa_node, "node/node1/cpulist": cpulist}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return bound.near("0000:05:00.0")

    return look


@pytest.mark.parametrize(
    ("numa_node", "cpulist", "bound_to"),
    [
        ("1\n", "4-7,12-15\n", {4, 5, 6, 7}),  # the scheduler allows no more
        ("1\n", "6\n", {6}),
        ("-1\n", "4-7\n", set(range(8))),  # the firmware names no node
        ("1\n", "12-15\n", set(range(8))),  # all of them belong to others
    ],
)
def test_the_processors_near_a_device(near, numa_node, cpulist, bound_to):
    assert near(numa_node, cpulist) == bound_to


def test_a_device_that_sysfs_does_not_show(near):
    near("1\n", "4-7\n")
    assert bound.near("0000:99:00.0") == set(range(8))


def test_the_process_becomes_the_command_with_its_binding(monkeypatch):
    torch = pytest.importorskip("torch")
    one = min(os.sched_getaffinity(0))
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda index: type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x65, "pci_device_id": index})(),
    )  # fmt: skip
    monkeypatch.setattr(bound, "near", lambda address: done.append(address) or {one})
    monkeypatch.setattr(bound.os, "sched_setaffinity", lambda pid, processors: done.append(processors))
    monkeypatch.setattr(bound.os, "execvp", lambda program, command: done.append(command))
    monkeypatch.setenv("LOCAL_RANK", "2")
    bound.main(["python", "-m", "meshwright", "train"])
    assert done == ["0000:65:02.0", {one}, ["python", "-m", "meshwright", "train"]]


@pytest.mark.skipif(sys.platform != "linux", reason="processors are chosen on Linux alone")
def test_without_a_device_the_command_runs_as_it_is():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "meshwright.engines.bound", sys.executable, "-c", "print(3)"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr
