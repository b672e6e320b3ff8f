"""A run to be started, and the files and commands that start it.

LaunchRequest   the engine's command, nodes, devices per node, environment
Dispatch        files, commands and notes that local, slurm and kubernetes make of it, without starting anything
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.environment import EnvironmentVariable

RESTARTS = "MESHWRIGHT_RESTARTS"
"""Number of earlier starts of the job. Above 0 the run resumes from the newest checkpoint, if there is one."""

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A run to be started on `num_nodes` nodes, one process per device."""

    name: str
    argv: tuple[str, ...]  # command of every process; begins with `python`
    files: Mapping[str, str]  # path below `folder` -> text, needed on every host
    folder: Path  # of the results, as processes see it
    num_nodes: int
    devices_per_node: int
    vendor: str | None  # of the accelerator; None: unknown, no devices are requested
    accelerator: str | None = None  # as the catalogue names it
    environment: tuple[EnvironmentVariable, ...] = ()
    exclude: tuple[str, ...] = ()  # hosts to exclude
    max_restarts: int = 0
    checkpoints: str | None = None  # their folder; None: the run saves none
    resume: bool = False  # resume from the newest checkpoint of an earlier job
    numa: bool = False  # bind each process to the NUMA node of its device

    @property
    def torchrun_options(self) -> tuple[str, ...]:
        """Options that torchrun has wherever it runs."""
        binding = ("--numa-binding", "node") if self.numa else ()
        return ("--nproc-per-node", str(self.devices_per_node), *binding)

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Files and commands that start a run; a dry run shows them."""

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
    """Return the number of nodes and of devices on each, for a plan of `num_processes` devices.

    `cluster_nodes` is the cluster's number of nodes and `most_per_node` the devices of one node, None if unknown. The
    other two are the user's choice. Raises InputError when they do not give the plan's
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
    """Read a list of hosts, one per line, as `meshwright doctor --compare --exclude-file` writes it.

    Raises InputError when the file is not there or a line is no host name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise InputError(f"the list of hosts cannot be read ({reason})", got=str(path)) from None
    hosts = [host for line in lines if (host := line.partition("#")[0].strip())]
    for host in hosts:
        if not HOST.fullmatch(host):
            raise InputError(f"{path}: this is no host name", got=host, allowed="one host a line")
    return tuple(dict.fromkeys(hosts))
