"""`meshwright launch`: start a run on this host, under Slurm, on Kubernetes, with SkyPilot or with Ray."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from meshwright.api.folders import results_folder
from meshwright.cli.output import emit_json, emit_text, emitted_json, note, print_line, print_table, say, wants_json
from meshwright.cli.run_input import run_from
from meshwright.engines.base import find_engine
from meshwright.engines.choice import planned
from meshwright.engines.epochs import with_epochs_of_engine
from meshwright.engines.folders import locked, locked_checkpoints, refuse_finished
from meshwright.engines.local import with_accelerator_file
from meshwright.errors import InputError
from meshwright.json_values import picked
from meshwright.launch import kubernetes, local, ray, skypilot, slurm
from meshwright.launch.environment import environment, table_version
from meshwright.launch.request import Dispatch, LaunchRequest, read_hosts, shape
from meshwright.launch.site import KubernetesJobKind, Site, read_site, with_options
from meshwright.launch.slurm import LOGS
from meshwright.launch.start import follow, require, run_here, submit, write
from meshwright.specs.hardware import HERE
from meshwright.specs.run import Run


def run(
    *,
    run_path: Path,
    place: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    folder: Path | None,
    site_path: Path | None,
    exclude_file: Path | None,
    resume: bool,
    force: bool,
    **options: Any,
) -> None:
    """Generate what starts the run, and show or start it. `options`: of one place alone, and of the request."""
    given = {name: value for name in ONLY_ON if (value := options.pop(name))}
    check_place(place, given)
    site = site_from(site_path, given)
    exclude = () if exclude_file is None else read_hosts(exclude_file)
    if exclude and place not in (SLURM, KUBERNETES):
        raise InputError("hosts to exclude are for slurm and kubernetes", got=", ".join(exclude))
    begun = run_from(run_path, overrides=overrides)
    request, found = request_for(
        begun, place=place, site=site, given=given, folder=folder, exclude=exclude, resume=resume, **options
    )
    if folder is None and "rendezvous" in given:
        raise InputError(
            "all hosts of a rendezvous need the same folder, and each would take its next free one",
            hint="--out DIR, the same on all",
        )
    if dry_run:
        if folder is not None:
            write(found.files)
        _show(request, found, place=place)
        return
    if not resume:
        refuse_finished(request.folder, is_forced=force)
    code = _start(place, request, found, wait=bool(given.get("wait")))
    if code:
        raise click.exceptions.Exit(code)


def _document(request: LaunchRequest, found: Dispatch, *, place: str) -> dict[str, Any]:
    return {
        **picked(request, "name", "num_nodes", "devices_per_node", "folder", "environment", "exclude"),
        **picked(found, "commands", "notes"),
        "on": place,
        "environment_version": table_version(),
        "files": dict(found.files),
    }


def _show(request: LaunchRequest, found: Dispatch, *, place: str) -> None:
    if emitted_json(_document(request, found, place=place)):
        return
    print_line(f"{request.name}: {request.num_nodes} x {request.devices_per_node} processes on {place}", style="bold")
    print_line()
    rows = [(f"{v.name}={v.value}", v.reason, v.source) for v in request.environment]
    print_table(["environment", "because", "says"], rows, caption=f"Table of {table_version()}.")
    for path, text in found.files.items():
        print_line(f"--- {path}", style="bold")
        emit_text(text if text.endswith("\n") else text + "\n")
        print_line()
    print_line("--- commands", style="bold")
    for one in found.commands:
        emit_text(shlex.join(one) + "\n")
    note(*found.notes)


def _start(place: str, request: LaunchRequest, found: Dispatch, *, wait: bool) -> int:
    """Write the files, run the commands, and report the result. Returns the exit code."""
    note(*found.notes)
    if place != LOCAL:
        require(found.commands[0][0])
    answers: dict[str, Any] = {}
    code = 0
    with ExitStack() as locks:
        if place == LOCAL and request.num_nodes == 1:  # before another training's run file is replaced
            _lock(request, locks)
        write(found.files)
        if place == LOCAL:
            code = run_here(found.commands[0])
            answers["exit_code"] = code
        else:
            answers["answers"] = [submit(one) for one in found.commands]
    if place == SLURM:
        answers["job"] = job = answers["answers"][0].partition(";")[0]
        if wait:
            ended = follow(job, folder=request.folder, say=say)
            code = answers["exit_code"] = 0 if ended.state == "COMPLETED" else ended.exit_code or 1
        elif not wants_json():
            print_line(f"Submitted to Slurm as {job}; logs: {request.folder / LOGS}, by rank.")
    if wants_json():
        emit_json(_document(request, found, place=place) | answers)
    elif place not in (LOCAL, SLURM):
        print_line("\n".join(answers["answers"]))
    return code


def _lock(request: LaunchRequest, locks: ExitStack) -> None:
    """Lock the folders of the training, or only look whether they are free: `meshwright train` locks them itself."""
    locks.enter_context(locked(request.folder))
    if request.checkpoints is not None:
        locks.enter_context(locked_checkpoints(Path(request.checkpoints)))
    if request.argv[:4] == ("python", "-m", "meshwright", "train"):
        locks.close()


# --- the request ---


LOCAL, SLURM, KUBERNETES, SKYPILOT, RAY = "local", "slurm", "kubernetes", "skypilot", "ray"
ONLY_ON = {
    "rendezvous": LOCAL, "partition": SLURM, "account": SLURM, "qos": SLURM, "time": SLURM,
    "container": SLURM, "directives": SLURM, "wait": SLURM, "kind": KUBERNETES, "image": KUBERNETES,
    "namespace": KUBERNETES, "results": KUBERNETES,
}  # fmt: skip
"""Options that one place alone has, by their names in the program."""

Given = Mapping[str, Any]
"""Options of `ONLY_ON` that the command line has."""


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
    return with_options(site, slurm=slurm, kubernetes=kubernetes)


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
    numa: bool,
) -> tuple[LaunchRequest, Dispatch]:
    """The run with its command, nodes and environment; and the files and commands that start it at `place`."""
    run, counted = with_epochs_of_engine(run)
    run = _with_plan(run)
    here = folder or results_folder(run, resume=resume)
    there = _folder_there(run.name, here, place, site, given)
    lowered = with_accelerator_file(find_engine(run.engine).lower(run, folder=there), run)
    if "DATASET" in lowered.argv:
        raise InputError("the command has no data set", got="data.source: synthetic", hint="name it: data.source")
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
        accelerator=None if known is None or known.vendor == "generic" else known.name,
        environment=environment(
            vendor=known and known.vendor, architecture=known and known.architecture, engine=run.engine,
            num_nodes=nodes, devices_per_node=each, site=site.model_dump(), folder=there, given=_variables(variables),
            layers={"the engine": dict(lowered.env), "the site file": site.environment},
            inherited=os.environ if place in (LOCAL, SLURM) else None,
        ),
        exclude=exclude,
        max_restarts=max_restarts,
        checkpoints=run.train.checkpoint.folder if run.train.checkpoint and lowered.resumes else None,
        resume=resume,
        numa=site.numa or numa,
    )  # fmt: skip
    found = _dispatch(place, request, site, given, here=here)
    return request, replace(found, notes=(*found.notes, counted)) if counted else found


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


def _folder_there(name: str, folder: Path, place: str, site: Site, given: Given) -> Path:
    """Folder of the results as the processes see it."""
    if place not in (KUBERNETES, SKYPILOT):
        return folder
    mounts = [claim.mount for claim in site.kubernetes.claims] if place == KUBERNETES else site.skypilot.mounts
    return given.get("results") or (Path(mounts[0]) / name if mounts else folder)


def _variables(assignments: tuple[str, ...]) -> dict[str, str | None]:
    """Variables of --env; None removes one."""
    given: dict[str, str | None] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InputError("--env", got=assignment, allowed="NAME=VALUE, or NAME= to remove a variable")
        given[name] = value or None
    return given


def _dispatch(place: str, request: LaunchRequest, site: Site, given: Given, *, here: Path) -> Dispatch:
    if place == LOCAL:
        found = local.dispatch(request, python=site.python or sys.executable, rendezvous=given.get("rendezvous"))
    elif place == SLURM:
        inside = "python" if site.slurm.container else sys.executable
        settings = slurm.SlurmSettings(site=site.slurm, python=site.python or inside, workdir=Path.cwd())
        found = slurm.dispatch(request, settings)
    elif place == RAY:
        found = ray.dispatch(request, address=site.ray.address, python=site.python or "python", workdir=Path.cwd())
    elif place == SKYPILOT:
        found = skypilot.dispatch(request, site.skypilot, python=site.python or "python", here=here)
    else:
        of_pods = kubernetes.KubernetesSettings(site=site.kubernetes, python=site.python or "python", here=here)
        found = kubernetes.dispatch(request, of_pods)
    if request.checkpoints is None and (request.max_restarts or request.resume):
        reason = "the run saves no checkpoints (train.checkpoint), or its program does not resume by itself"
        return replace(found, notes=(*found.notes, f"a restart begins at the first step: {reason}"))
    return found
