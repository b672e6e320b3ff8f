"""Two hosts on this machine: network namespaces with names and addresses of their own, joined by a cable.

Needs root and Debian's iproute2 and util-linux. They share the disk, as hosts of a cluster share a file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "unshare", "hostname")
OVERLAYS = Path("/etc/netns")  # `ip netns exec NAME` lays what is in NAME here over /etc


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: `inside` is what a command is started with to run there."""

    name: str
    namespace: str
    interface: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        script = f'hostname {self.name} && exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script, "sh")


def why_not() -> str | None:
    """Reason why there can be no hosts here; None: there can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"two hosts need {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"meshwright-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    inside = ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", name]
    tried = subprocess.run(inside, capture_output=True, text=True, check=False)
    _ip("netns", "del", name)
    return None if tried.returncode == 0 else f"no host name of its own: {tried.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """host1 and host2, which end with the context, processes included."""
    hosts = [
        Host(name=f"host{i}", namespace=f"mw{os.getpid()}-{i}", interface=f"cable{i}", address=f"10.77.0.{i}")
        for i in (1, 2)
    ]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _name_hosts(host, hosts)
        one, other = hosts
        _ip(
            "-n", one.namespace, "link", "add", one.interface, "type", "veth",
            "peer", "name", other.interface, "netns", other.namespace,
        )  # fmt: skip
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
        yield one, other
    finally:
        for host in hosts:
            _end_processes(host)
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.namespace)
            shutil.rmtree(OVERLAYS / host.namespace, ignore_errors=True)
        with suppress(OSError):  # others have theirs there
            OVERLAYS.rmdir()


def _name_hosts(host: Host, hosts: list[Host]) -> None:
    folder = OVERLAYS / host.namespace
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{one.address} {one.name}" for one in hosts)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def processes_of(host: Host) -> list[int]:
    """All processes that run on `host`."""
    done = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _end_processes(host: Host) -> None:
    for pid in processes_of(host):
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
