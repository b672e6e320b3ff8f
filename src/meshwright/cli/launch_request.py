"""Make a request of the options of `meshwright launch`, and files and commands of the request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.api.folders import results_folder
from meshwright.engines.base import Launch, find_engine
from meshwright.engines.choice import planned
from meshwright.engines.local import with_accelerator_file
from meshwright.errors import InputError
from meshwright.launch import kubernetes, local, slurm
from meshwright.launch.environment import EnvironmentVariable, environment
from meshwright.launch.request import Dispatch, LaunchRequest, shape
from meshwright.launch.site import KubernetesJobKind, Site, read_site
from meshwright.specs.hardware import HERE
from meshwright.specs.run import Run

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"
ONLY_ON = {
    "rendezvous": LOCAL, "partition": SLURM, "account": SLURM, "qos": SLURM, "time": SLURM,
    "container": SLURM, "directives": SLURM, "wait": SLURM, "kind": KUBERNETES, "image": KUBERNETES,
    "namespace": KUBERNETES, "results": KUBERNETES,
}  # fmt: skip
"""Options that one place alone has, by their names in the program."""

Given = Mapping[str, Any]
"""Those of `ONLY_ON` that the command line has."""


def check_place(place: str, given: Given) -> None:
    """Raise InputError for an option of another place."""
    for name in given:
        if ONLY_ON[name] != place:
            flag = "--" + {"directives": "directive"}.get(name, name)
            raise InputError(f"{flag} is for --on {ONLY_ON[name]}", got=f"--on {place}")


def site_from(path: Path | None, given: Given) -> Site:
    """The site file; options of the command line replace its values."""
    site = Site() if path is None else read_site(path)
    slurm = {k: given[k] for k in ("partition", "account", "qos", "time", "container") if k in given}
    slurm["directives"] = (*site.slurm.directives, *given.get("directives", ()))
    kubernetes = {k: given[k] for k in ("image", "namespace") if k in given}
    if "kind" in given:
        kubernetes["kind"] = KubernetesJobKind(given["kind"])
    return site.model_copy(
        update={
            "slurm": site.slurm.model_copy(update=slurm),
            "kubernetes": site.kubernetes.model_copy(update=kubernetes),
        }
    )


def request_for(
    run: Run,
    *,
    place: str,
    site: Site,
    given: Given,
    folder: Path | None,
    variables: tuple[str, ...],
    exclude: tuple[str, ...],
    num_nodes: int | None,
    devices_per_node: int | None,
    max_restarts: int,
    resume: bool,
) -> tuple[LaunchRequest, Dispatch]:
    """The run with its command, nodes and environment; and the files and commands that start it at `place`."""
    run = _with_plan(run)
    here = folder or results_folder(run, resume=resume)
    there = _folder_in_pods(run.name, here, site, given) if place == KUBERNETES else here
    lowered = with_accelerator_file(find_engine(run.engine).lower(run, folder=there), run)
    named = None if run.cluster_name == HERE else run.cluster
    if named is not None and len(named.node_sizes) > 1 and (num_nodes is None or devices_per_node is None):
        sizes = " and ".join(map(str, named.node_sizes))
        raise InputError(
            f"a launch starts as many processes on each node, and nodes of {named.name} have {sizes} devices",
            hint="`meshwright export` writes the files, and prints a torchrun command for the hosts of each part",
        )
    nodes, each = shape(
        lowered.num_processes, cluster_nodes=named and named.num_nodes, num_nodes=num_nodes,
        devices_per_node=devices_per_node, most_per_node=named and named.devices_per_node,
    )  # fmt: skip
    known = None if run.cluster is None else run.cluster.accelerator
    request = LaunchRequest(
        name=run.name,
        argv=lowered.argv,
        files=lowered.files,
        folder=there,
        num_nodes=nodes,
        devices_per_node=each,
        vendor=None if known is None or known.vendor == "generic" else known.vendor,
        environment=_environment(
            run, lowered, site, variables, num_nodes=nodes, devices_per_node=each,
            folder=there, is_inherited=place != KUBERNETES,
        ),
        exclude=exclude,
        max_restarts=max_restarts,
        checkpoints=run.train.checkpoint and run.train.checkpoint.folder,
        resume=resume,
    )  # fmt: skip
    return request, _dispatch(place, request, site, given, here=here)


def _with_plan(run: Run) -> Run:
    """The run with its pinned plan, or with the planner's best plan that its engine supports."""
    if run.plan is not None:
        return run
    if run.cluster is None:
        raise InputError(
            "the run pins no plan, and its cluster is not known to plan for", got=f"cluster: {run.cluster_name}",
            hint="for example --set cluster=h100-8x4, or --set parallel.data_shard=2",
        )  # fmt: skip
    return planned(run)


def _folder_in_pods(name: str, folder: Path, site: Site, given: Given) -> Path:
    """Folder of the results as the pods see it."""
    if "results" in given:
        return given["results"]
    claims = site.kubernetes.claims
    return Path(claims[0].mount) / name if claims else folder


def _environment(
    run: Run, lowered: Launch, site: Site, variables: tuple[str, ...], *, num_nodes: int, devices_per_node: int,
    folder: Path, is_inherited: bool,
) -> tuple[EnvironmentVariable, ...]:  # fmt: skip
    given: dict[str, str | None] = {}
    for assignment in variables:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InputError("--env", got=assignment, allowed="NAME=VALUE, or NAME= to remove a variable")
        given[name] = value or None
    known = None if run.cluster is None else run.cluster.accelerator
    return environment(
        vendor=known and known.vendor,
        architecture=known and known.architecture,
        engine=run.engine,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        site=site.model_dump(),
        layers={"the engine": dict(lowered.env), "the site file": site.environment},
        folder=folder,
        inherited=os.environ if is_inherited else None,
        given=given,
    )


def _dispatch(place: str, request: LaunchRequest, site: Site, given: Given, *, here: Path) -> Dispatch:
    found = _dispatch_at(place, request, site, given, here=here)
    if request.checkpoints is None and (request.max_restarts or request.resume):
        caution = "the run saves no checkpoints (train.checkpoint): a restart begins at the first step"
        return replace(found, notes=(*found.notes, caution))
    return found


def _dispatch_at(place: str, request: LaunchRequest, site: Site, given: Given, *, here: Path) -> Dispatch:
    if place == LOCAL:
        python = site.python or sys.executable
        return local.dispatch(request, python=python, rendezvous=given.get("rendezvous"))
    if place == SLURM:
        inside = "python" if site.slurm.container else sys.executable
        settings = slurm.SlurmSettings(site=site.slurm, python=site.python or inside, workdir=Path.cwd())
        return slurm.dispatch(request, settings)
    settings = kubernetes.KubernetesSettings(site=site.kubernetes, python=site.python or "python", here=here)
    return kubernetes.dispatch(request, settings)
