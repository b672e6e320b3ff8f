"""A Slurm of one's own on this machine: a controller and several node daemons on ports of their own.

    python tests/engines/launch/slurm_cluster.py FOLDER      starts one, says what SLURM_CONF to use, stops with Ctrl-C

Needs Debian's slurmctld, slurmd, slurm-client and munge, and touches nothing of the system: key, sockets, state and
logs are in FOLDER.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.engines.local import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin")
DEADLINE_S = 60


def find(program: str) -> str | None:
    """Daemons lie where a user's PATH may not reach."""
    return shutil.which(program, path=os.pathsep.join((os.environ["PATH"], *SYSTEM_FOLDERS)))


def missing() -> list[str]:
    return [program for program in PROGRAMS if find(program) is None]


def configuration(folder: Path, *, num_nodes: int) -> str:
    """slurm.conf: nodes that share this host, no accounting, jobs that may be queued again at once."""
    host, user = socket.gethostname().split(".")[0], pwd.getpwuid(os.getuid()).pw_name
    names = [f"n{i + 1}" for i in range(num_nodes)]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
        for name in names
    ]
    return "\n".join([
        "ClusterName=toy", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={free_port()}",
        f"SlurmUser={user}", f"SlurmdUser={user}",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/slurmd-%n.log",
        "ProctrackType=proctrack/pgid", "TaskPlugin=task/none", "MpiDefault=none",
        "SelectType=select/linear", "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=2,bf_interval=2",
        "JobAcctGatherType=jobacct_gather/none", "AccountingStorageType=accounting_storage/none",
        "ReturnToService=2", "SlurmdTimeout=300", "KillWait=10", "InactiveLimit=0", "OverTimeLimit=0",
        *nodes, f"PartitionName=toy Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP", "",
    ])  # fmt: skip


@contextmanager
def slurm_cluster(folder: Path, *, num_nodes: int = 2) -> Iterator[dict[str, str]]:
    """The environment with which Slurm's commands reach a cluster of `num_nodes` nodes, which ends with the context."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(configuration(folder, num_nodes=num_nodes))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    environment = os.environ | {"SLURM_CONF": str(conf)}
    munged = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        program = find(name)
        assert program is not None
        with (folder / f"{name}.out").open("ab") as out:
            daemons.append(subprocess.Popen([program, *arguments], env=environment, stdout=out, stderr=out))

    try:
        start(*munged)
        _wait_for(lambda: (folder / "munge.socket").exists())
        start("slurmctld", "-D", "-f", str(conf))
        for i in range(num_nodes):
            (folder / f"spool-n{i + 1}").mkdir()
            start("slurmd", "-D", "-f", str(conf), "-N", f"n{i + 1}")
        _wait_for(lambda: _num_idle(environment) == num_nodes)
        yield environment
    finally:
        subprocess.run(["scancel", "--user", str(os.getuid())], env=environment, check=False, capture_output=True)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _num_idle(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return len(done.stdout.split())


def _wait_for(condition) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the cluster does not come up: see its logs")
        time.sleep(0.2)


if __name__ == "__main__":
    with slurm_cluster(Path(sys.argv[1])) as found:
        print(f"export SLURM_CONF={found['SLURM_CONF']}", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass
