"""`meshwright launch`: start a run on this host, under Slurm, or on Kubernetes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import json_option, run_argument, set_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.engines.base import Launch
    from meshwright.launch.environment import Variable
    from meshwright.launch.request import Dispatch, Request
    from meshwright.launch.site import Site
    from meshwright.specs.run import Run

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"
ONLY_ON = {
    "rendezvous": LOCAL, "partition": SLURM, "account": SLURM, "qos": SLURM, "time": SLURM,
    "container": SLURM, "directives": SLURM, "wait": SLURM, "kind": KUBERNETES, "image": KUBERNETES,
    "namespace": KUBERNETES, "results": KUBERNETES,
}  # fmt: skip


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--on", "place", type=click.Choice([LOCAL, SLURM, KUBERNETES]), required=True,
                     help="Where it is started."),
        set_option,
        click.option("--dry-run", is_flag=True, help="Show every file and command; start nothing."),
        click.option("--out", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                     help="Where files, logs and results go; a dry run writes its files there.  [default: runs/NAME]"),
        click.option("--site", "site_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                     envvar="MESHWRIGHT_SITE", help="What this place has of its own: partition, interface, image. "
                     "[default: $MESHWRIGHT_SITE]"),
        click.option("--env", "variables", metavar="NAME=VALUE", multiple=True,
                     help="Set a variable of every process; NAME= takes one away. May be repeated."),
        click.option("--exclude-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                     help="Hosts to leave out, one a line, as `meshwright doctor --compare` writes them."),
        click.option("--nodes", "num_nodes", type=click.IntRange(min=1), metavar="N",
                     help="Nodes.  [default: the cluster's]"),
        click.option("--devices-per-node", type=click.IntRange(min=1), metavar="N",
                     help="Processes on each.  [default: the cluster's]"),
        click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, metavar="N",
                     help="How often to start again after a failure."),
        click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in the run's folder, if any."),
        click.option("--rendezvous", metavar="HOST:PORT", help="local: one of the hosts, by which all meet."),
        click.option("--partition", metavar="NAME", help="slurm: the partition."),
        click.option("--account", metavar="NAME", help="slurm: the account that pays."),
        click.option("--qos", metavar="NAME", help="slurm: the quality of service."),
        click.option("--time", metavar="D-HH:MM:SS", help="slurm: the time limit."),
        click.option("--container", metavar="IMAGE", help="slurm: run inside this image."),
        click.option("--directive", "directives", metavar="--NAME=VALUE", multiple=True,
                     help="slurm: one more option of sbatch. May be repeated."),
        click.option("--wait", is_flag=True, help="slurm: follow it to its end; the exit code is the run's."),
        click.option("--kind", type=click.Choice(["pytorchjob", "jobset"]), help="kubernetes: the resource."),
        click.option("--image", metavar="IMAGE", help="kubernetes: the container image."),
        click.option("--namespace", metavar="NAME", help="kubernetes: the namespace."),
        click.option("--results", type=click.Path(path_type=Path), metavar="DIR",
                     help="kubernetes: the results in the pods, on a claim.  [default: the first claim's folder/NAME]"),
        json_option,
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@verb(
    "launch",
    examples=[
        "meshwright launch run.yaml --on local --max-restarts 2",
        "meshwright launch run.yaml --on local --nodes 2 --rendezvous node1:29500 --out runs/first",
        "meshwright launch run.yaml --on slurm --dry-run",
        "meshwright launch run.yaml --on slurm --partition gpu --time 1-00:00:00 --exclude-file bad.txt --wait",
        "meshwright launch run.yaml --on kubernetes --kind jobset --site site.yaml --dry-run --json",
    ],
)
@run_argument()
@_options
def command(
    run_path: Path,
    place: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    folder: Path | None,
    site_path: Path | None,
    variables: tuple[str, ...],
    exclude_file: Path | None,
    num_nodes: int | None,
    devices_per_node: int | None,
    max_restarts: int,
    resume: bool,
    as_json: bool,
    **special: Any,
) -> None:
    """Start a run on one host or many.

    Makes what starts it: a torchrun command, an sbatch script or a Kubernetes manifest, with the environment that suits
    the accelerator. A dry run shows all of it, with the reason of every variable, and starts nothing.
    """
    from meshwright.cli.run_input import run_from
    from meshwright.launch.request import Request, read_hosts, shape
    from meshwright.specs.hardware import HERE

    given = {name: value for name, value in special.items() if value}
    for name in given:
        if ONLY_ON[name] != place:
            flag = "--" + {"directives": "directive"}.get(name, name)
            raise InputError(f"{flag} is for --on {ONLY_ON[name]}", got=f"--on {place}")
    site = _site(site_path, given)
    exclude = () if exclude_file is None else read_hosts(exclude_file)
    run = _with_plan(run_from(run_path, overrides=overrides))
    local_folder = folder or _free_folder(run.name, resume=resume)
    there = _there(run.name, local_folder, site, given) if place == KUBERNETES else local_folder
    lowered = _lower(run, there)
    named = None if run.cluster_name == HERE else run.cluster
    nodes, each = shape(
        lowered.num_processes, cluster_nodes=named and named.num_nodes, num_nodes=num_nodes,
        devices_per_node=devices_per_node, most_per_node=named and named.devices_per_node,
    )  # fmt: skip
    known = None if run.cluster is None else run.cluster.accelerator
    request = Request(
        name=run.name,
        argv=lowered.argv,
        files=lowered.files,
        folder=there,
        num_nodes=nodes,
        devices_per_node=each,
        vendor=None if known is None or known.vendor == "generic" else known.vendor,
        environment=_environment(
            run,
            lowered,
            site,
            variables,
            num_nodes=nodes,
            devices_per_node=each,
            is_inherited=place != KUBERNETES,
        ),
        exclude=exclude,
        max_restarts=max_restarts,
        checkpoints=run.train.checkpoint and run.train.checkpoint.folder,
        resume=resume,
    )
    found = _dispatch(place, request, site, given, here=local_folder)
    if folder is None and "rendezvous" in given:
        raise InputError(
            "hosts that meet need one folder: each would take the next that is free",
            hint="--out DIR, the same on all",
        )
    if dry_run:
        if folder is not None:
            from meshwright.launch.start import write

            write(found.files)
        _show(request, found, place=place, as_json=as_json)
        return
    code = _start(place, request, found, wait=bool(given.get("wait")), as_json=as_json)
    if code:
        raise click.exceptions.Exit(code)


# --- what is to be started ---


def _site(path: Path | None, given: dict[str, Any]) -> Site:
    """The site file, with the command line laid over it."""
    from meshwright.launch.site import Kind, Site, read_site

    site = Site() if path is None else read_site(path)
    slurm = {k: given[k] for k in ("partition", "account", "qos", "time", "container") if k in given}
    slurm["directives"] = (*site.slurm.directives, *given.get("directives", ()))
    kubernetes = {k: given[k] for k in ("image", "namespace") if k in given}
    if "kind" in given:
        kubernetes["kind"] = Kind(given["kind"])
    return site.model_copy(
        update={
            "slurm": site.slurm.model_copy(update=slurm),
            "kubernetes": site.kubernetes.model_copy(update=kubernetes),
        }
    )


def _with_plan(run: Run) -> Run:
    """The run with its plan, or with the planner's best that its engine runs."""
    if run.plan is not None:
        return run
    if run.cluster is None:
        raise InputError(
            "the run pins no plan, and its cluster is not known to plan for", got=f"cluster: {run.cluster_name}",
            hint="for example --set cluster=h100-8x4, or --set parallel.data_shard=2",
        )  # fmt: skip
    from meshwright.engines.choice import planned

    return planned(run)


def _lower(run: Run, folder: Path) -> Launch:
    from meshwright.engines.base import find_engine

    return find_engine(run.engine).lower(run, folder=folder)


def _there(name: str, folder: Path, site: Site, given: dict[str, Any]) -> Path:
    """Where the results are in the pods."""
    if "results" in given:
        return given["results"]
    claims = site.kubernetes.claims
    return Path(claims[0].mount) / name if claims else folder


def _free_folder(name: str, *, resume: bool) -> Path:
    from meshwright.cli.train import default_folder

    return default_folder(name, resume=resume)


def _environment(
    run: Run, lowered: Launch, site: Site, variables: tuple[str, ...], *, num_nodes: int, devices_per_node: int,
    is_inherited: bool,
) -> tuple[Variable, ...]:  # fmt: skip
    from meshwright.launch.environment import environment

    said: dict[str, str | None] = {}
    for assignment in variables:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InputError("--env", got=assignment, allowed="NAME=VALUE, or NAME= to take a variable away")
        said[name] = value or None
    known = None if run.cluster is None else run.cluster.accelerator
    return environment(
        vendor=known and known.vendor,
        architecture=known and known.architecture,
        engine=run.engine,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        site=site.model_dump(),
        layers={"the engine": dict(lowered.env), "the site file": site.environment},
        inherited=os.environ if is_inherited else None,
        said=said,
    )


def _dispatch(place: str, request: Request, site: Site, given: dict[str, Any], *, here: Path) -> Dispatch:
    found = _place(place, request, site, given, here=here)
    if request.checkpoints is None and (request.max_restarts or request.resume):
        words = "the run saves no checkpoints (train.checkpoint): when it starts again it starts from the beginning"
        return replace(found, notes=(*found.notes, words))
    return found


def _place(place: str, request: Request, site: Site, given: dict[str, Any], *, here: Path) -> Dispatch:
    from meshwright.launch import kubernetes, local, slurm

    if place == LOCAL:
        python = site.python or sys.executable
        return local.dispatch(request, python=python, rendezvous=given.get("rendezvous"))
    if place == SLURM:
        inside = "python" if site.slurm.container else sys.executable
        settings = slurm.Settings(site=site.slurm, python=site.python or inside, workdir=Path.cwd())
        return slurm.dispatch(request, settings)
    settings = kubernetes.Settings(site=site.kubernetes, python=site.python or "python", here=here)
    return kubernetes.dispatch(request, settings)


# --- show, or start ---


def _document(request: Request, found: Dispatch, *, place: str) -> dict[str, Any]:
    from meshwright.launch.environment import table_version

    return {
        "name": request.name,
        "on": place,
        "num_nodes": request.num_nodes,
        "devices_per_node": request.devices_per_node,
        "folder": request.folder,
        "environment": request.environment,
        "environment_version": table_version(),
        "exclude": request.exclude,
        "files": dict(found.files),
        "commands": found.commands,
        "notes": found.notes,
    }


def _show(request: Request, found: Dispatch, *, place: str, as_json: bool) -> None:
    import shlex

    from meshwright.cli.output import emit_json, note, print_line, print_table
    from meshwright.launch.environment import table_version

    if as_json:
        emit_json(_document(request, found, place=place))
        return
    print_line(
        f"{request.name}: {request.num_nodes} x {request.devices_per_node} processes on {place}", style="bold"
    )
    print_line()
    rows = [(f"{v.name}={v.value}", v.reason, v.source) for v in request.environment]
    print_table(["environment", "because", "says"], rows, caption=f"Table of {table_version()}.")
    for path, text in found.files.items():
        print_line(f"--- {path}", style="bold")
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        print_line()
    print_line("--- commands", style="bold")
    for one in found.commands:
        sys.stdout.write(shlex.join(one) + "\n")
    for words in found.notes:
        note(words)


def _start(place: str, request: Request, found: Dispatch, *, wait: bool, as_json: bool) -> int:
    """Write the files, run the commands, and say what came of it. Returns the exit code."""
    from meshwright.cli.output import emit_json, note, print_line
    from meshwright.launch.slurm import LOGS
    from meshwright.launch.start import require, run_here, submit, write

    for words in found.notes:
        note(words)
    if place != LOCAL:
        require(found.commands[0][0])
    if place == LOCAL and request.num_nodes == 1:
        from meshwright.cli.train import alone_in

        with alone_in(request.folder):  # else its run file would be replaced
            pass
    write(found.files)
    answers: dict[str, Any] = {}
    code = 0
    if place == LOCAL:
        code = run_here(found.commands[0])
        answers["exit_code"] = code
    else:
        answers["answers"] = [submit(one) for one in found.commands]
    if place == SLURM:
        answers["job"] = job = answers["answers"][0].partition(";")[0]
        if wait:
            code = answers["exit_code"] = _wait(job, request.folder)
        elif not as_json:
            print_line(f"Submitted to Slurm as {job}; logs: {request.folder / LOGS}, by rank.")
    if as_json:
        emit_json(_document(request, found, place=place) | answers)
    elif place == KUBERNETES:
        print_line("\n".join(answers["answers"]))
    return code


def _wait(job: str, folder: Path) -> int:
    from meshwright.launch.follow import follow

    ended = follow(job, folder=folder, say=lambda words: print(words, file=sys.stderr, flush=True))
    if ended.state == "COMPLETED":
        return 0
    return ended.exit_code or 1
