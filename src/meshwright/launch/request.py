"""What is to be started, and what starting it takes.

LaunchRequest    a run on nodes: the engine's command, how many processes where, and their environment
Dispatch   what local, slurm and kubernetes make of it: files, commands, notes. Nothing is started by that
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.environment import EnvironmentVariable

RESTARTS = "MESHWRIGHT_RESTARTS"
"""How often the whole job has been started before. More than 0: go on from the newest checkpoint, if there is one."""

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A run that is to be started on `num_nodes` nodes, one process a device."""

    name: str
    argv: tuple[str, ...]  # of every process; begins with `python`
    files: Mapping[str, str]  # path below `folder` -> text, needed on every host
    folder: Path  # of the results, as processes see it
    num_nodes: int
    devices_per_node: int
    vendor: str | None  # of the accelerator; None: not known, no devices are asked for
    environment: tuple[EnvironmentVariable, ...] = ()
    exclude: tuple[str, ...] = ()  # hosts to leave out
    max_restarts: int = 0
    checkpoints: str | None = None  # their folder; None: the run saves none
    resume: bool = False  # go on from the newest checkpoint of an earlier job

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Everything that starting takes: what a dry run shows."""

    files: Mapping[str, str]  # path -> text
    commands: tuple[tuple[str, ...], ...]  # in this order
    notes: tuple[str, ...] = field(default=())


def shape(
    num_processes: int,
    *,
    cluster_nodes: int | None,
    num_nodes: int | None,
    devices_per_node: int | None,
    most_per_node: int | None = None,
) -> tuple[int, int]:
    """Nodes, and devices on each, for a plan of `num_processes` devices.

    `cluster_nodes` is the cluster's number of nodes and `most_per_node` how many devices one of them has, None where
    it is not known; the other two are what the user asks for. Raises InputError when they do not give the plan's
    number of devices, or a node has fewer.
    """
    if num_nodes is None and devices_per_node is not None and num_processes % devices_per_node == 0:
        num_nodes = num_processes // devices_per_node
    nodes = num_nodes or cluster_nodes or 1
    each = devices_per_node or max(1, num_processes // nodes)
    if nodes * each != num_processes:
        raise InputError(
            "the plan needs another number of devices", got=f"{nodes} nodes x {each} = {nodes * each}",
            allowed=num_processes, hint="change --nodes and --devices-per-node, or the plan",
        )  # fmt: skip
    if most_per_node is not None and each > most_per_node:
        raise InputError(
            "a node of the cluster has fewer devices", got=f"{nodes} nodes x {each}", allowed=f"<= {most_per_node}",
            hint="more --nodes, or another cluster",
        )  # fmt: skip
    return nodes, each


def read_hosts(path: Path) -> tuple[str, ...]:
    """A list of hosts, one a line, as `meshwright doctor --compare --exclude-file` writes it.

    Raises InputError when the file is not there or a line is no host name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise InputError(f"the list of hosts cannot be read ({reason})", got=str(path)) from None
    hosts = [words for line in lines if (words := line.partition("#")[0].strip())]
    for host in hosts:
        if not HOST.fullmatch(host):
            raise InputError(f"{path}: this is no host name", got=host, allowed="one host a line")
    return tuple(dict.fromkeys(hosts))
