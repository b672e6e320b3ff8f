"""Reading a node: a reason instead of a value, and commands that end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from meshwright.doctor.host import Host, Unseen, run_command


def test_what_is_not_there_says_so(make_host):
    host = make_host({"/proc/x": "many\n"})
    with pytest.raises(Unseen, match="/proc/y: No such file"):
        host.read("/proc/y")
    with pytest.raises(Unseen, match="'many', not a number"):
        host.read_int("/proc/x")
    with pytest.raises(Unseen, match="nvidia-smi is not installed"):
        host.ask("nvidia-smi")


def test_files_are_in_natural_order_and_named_as_the_node_names_them(make_host):
    host = make_host({f"/sys/cpu{i}/x": "" for i in (10, 2, 1)})
    assert host.glob("/sys/cpu*/x") == ["/sys/cpu1/x", "/sys/cpu2/x", "/sys/cpu10/x"]


def test_slurm_names_the_node(make_host):
    files = {"/proc/sys/kernel/hostname": "gpu-017.example\n"}
    assert make_host(files).name == "gpu-017.example"
    assert make_host(files, {}, {"SLURMD_NODENAME": "gpu-017"}).name == "gpu-017"


def test_a_command_that_does_not_end_is_killed_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    start_s = time.monotonic()
    with pytest.raises(Unseen, match="did not end within 2 s"):
        run_command(["sh", "-c", f"sleep 300 & echo $! > {pid}; wait"], 2.0)
    assert time.monotonic() - start_s < 60
    deadline_s = time.monotonic() + 60
    while _is_alive(int(pid.read_text())):
        assert time.monotonic() < deadline_s, "what the command started still runs"
        time.sleep(0.05)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_output_and_exit_code_of_a_command():
    done = run_command([sys.executable, "-c", "import sys; print(1); print('why', file=sys.stderr); sys.exit(3)"], 30)
    assert (done.code, done.stdout, done.problem) == (3, "1\n", "why")
    with pytest.raises(Unseen, match="is not installed"):
        run_command(["no-such-command"], 1)


def test_a_setting_is_never_made(make_host):
    with pytest.raises(FileNotFoundError):
        make_host({}).write("/proc/sys/vm/new", "1")


def test_the_root_of_this_machine():
    assert Host().read_int("/proc/sys/kernel/pid_max") > 0
