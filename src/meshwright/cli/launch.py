"""`meshwright launch`: start a run on this host, under Slurm, or on Kubernetes."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from meshwright.cli.launch_request import KUBERNETES, LOCAL, SLURM, check_place, request_for, site_from
from meshwright.cli.output import emit_json, emit_text, note, print_line, print_table, say
from meshwright.cli.run_input import run_from
from meshwright.engines.folders import locked, locked_checkpoints, refuse_finished
from meshwright.errors import InputError
from meshwright.launch.environment import table_version
from meshwright.launch.request import Dispatch, LaunchRequest, read_hosts
from meshwright.launch.slurm import LOGS
from meshwright.launch.start import follow, require, run_here, submit, write


def run(
    *,
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
    force: bool,
    as_json: bool,
    **special: Any,
) -> None:
    """Generate what starts the run, and show or start it. `special`: options that one place alone has."""
    given = {name: value for name, value in special.items() if value}
    check_place(place, given)
    site = site_from(site_path, given)
    exclude = () if exclude_file is None else read_hosts(exclude_file)
    request, found = request_for(
        run_from(run_path, overrides=overrides),
        place=place,
        site=site,
        given=given,
        folder=folder,
        variables=variables,
        exclude=exclude,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        max_restarts=max_restarts,
        resume=resume,
    )
    if folder is None and "rendezvous" in given:
        raise InputError(
            "all hosts of a rendezvous need the same folder, and each would take its next free one",
            hint="--out DIR, the same on all",
        )
    if dry_run:
        if folder is not None:
            write(found.files)
        _show(request, found, place=place, as_json=as_json)
        return
    if not resume:
        refuse_finished(request.folder, is_forced=force)
    code = _start(place, request, found, wait=bool(given.get("wait")), as_json=as_json)
    if code:
        raise click.exceptions.Exit(code)


def _document(request: LaunchRequest, found: Dispatch, *, place: str) -> dict[str, Any]:
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


def _show(request: LaunchRequest, found: Dispatch, *, place: str, as_json: bool) -> None:
    if as_json:
        emit_json(_document(request, found, place=place))
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


def _start(place: str, request: LaunchRequest, found: Dispatch, *, wait: bool, as_json: bool) -> int:
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
            code = answers["exit_code"] = _wait(job, request.folder)
        elif not as_json:
            print_line(f"Submitted to Slurm as {job}; logs: {request.folder / LOGS}, by rank.")
    if as_json:
        emit_json(_document(request, found, place=place) | answers)
    elif place == KUBERNETES:
        print_line("\n".join(answers["answers"]))
    return code


def _lock(request: LaunchRequest, locks: ExitStack) -> None:
    """Lock the folders of the training, or only look whether they are free: `meshwright train` locks them itself."""
    locks.enter_context(locked(request.folder))
    if request.checkpoints is not None:
        locks.enter_context(locked_checkpoints(Path(request.checkpoints)))
    if request.argv[:4] == ("python", "-m", "meshwright", "train"):
        locks.close()


def _wait(job: str, folder: Path) -> int:
    ended = follow(job, folder=folder, say=say)
    if ended.state == "COMPLETED":
        return 0
    return ended.exit_code or 1
