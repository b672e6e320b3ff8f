"""A script for a Ray cluster: an actor on each node, with torchrun in it.

The folder of the results is on a file system that all nodes share, at the path that it has here. When a node fails, the
script starts all again, at most `max_restarts` times, unless the exit code says that it would not help.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import InputError, MissingDependencyError
from meshwright.launch.local import torchrun
from meshwright.launch.request import Dispatch, LaunchRequest
from meshwright.training.signals import STOPPED_EXIT_CODE

SCRIPT = "submit.py"
RESOURCES = {"NVIDIA": "GPU", "AMD": "GPU", "Intel": "HPU", "Google": "TPU"}  # docs.ray.io, Accelerator Support


def dispatch(request: LaunchRequest, *, address: str | None, python: str, workdir: Path) -> Dispatch:
    """Return the script, the run's files and the command that submits the script. Pure.

    address   of the cluster; None: as RAY_ADDRESS says
    workdir   folder in which relative paths begin
    """
    text = script(request, python=python, workdir=workdir)
    where = ("--address", address) if address else ()
    path = str(workdir / request.folder / SCRIPT)
    return Dispatch(
        files={str(request.folder / name): text for name, text in (*request.files.items(), (SCRIPT, text))},
        commands=(("ray", "job", "submit", *where, "--no-wait", "--", python, path),),
        notes=(f"every node needs Meshwright, and {workdir / request.folder} at this path",),
    )


def script(request: LaunchRequest, *, python: str, workdir: Path) -> str:
    """Return the text of the script. Pure."""
    return (Path(__file__).parent / "data" / "ray.txt").read_text(encoding="utf-8").format(
        num_nodes=request.num_nodes, devices=devices(request), workdir=str(workdir),
        command=torchrun(request, python), environment={v.name: v.value for v in request.environment},
        max_restarts=request.max_restarts, first=int(request.resume),
        final=(InputError.exit_code, MissingDependencyError.exit_code, int(STOPPED_EXIT_CODE)),
    )  # fmt: skip


def devices(request: LaunchRequest) -> dict[str, int]:
    """Return the devices of a node by Ray's name of their kind; none if it is unknown."""
    kind = RESOURCES.get(request.vendor or "")
    return {kind: request.devices_per_node} if kind else {}
