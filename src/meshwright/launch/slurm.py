"""One sbatch script: a task a device, straight under srun.

    the time limit comes near, or Slurm preempts    SIGUSR1 -> every process saves and ends -> the job is queued again
    a process is lost                               all end -> queued again, at most `max_restarts` times
    a node is lost                                  Slurm queues the job again by itself
    bad input, a package is missing                 the job ends: starting again would not help

A job that is queued again finds its checkpoints: MESHWRIGHT_RESTARTS says that it has been started before. `scancel`
ends it for good.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.request import RESTARTS, Dispatch, Request
from meshwright.launch.site import Runtime, SlurmSite

SCRIPT = "submit.sh"
LOGS = "logs"
FAILURES = "failures"
GRACE_S = 120
"""After one process has ended, the others get this long: to write what they write at the end, or to notice a loss."""

FIRST_PORT, NUM_PORTS = 15000, 15000  # below those that Linux gives to anybody
OWN_OPTIONS = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node", "--requeue", "--no-requeue", "--signal",
    "--output", "--error", "--open-mode", "--chdir", "--exclude", "--job-name",
)  # fmt: skip
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")

RANK_WORDS = """\
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a site says of Slurm, and where the job runs."""

    site: SlurmSite
    python: str
    workdir: Path


def dispatch(request: Request, settings: Settings) -> Dispatch:
    """The script, the files beside it, and the command that submits it. Pure.

    Raises InputError for what sbatch would not read as it is meant.
    """
    path = str(request.folder / SCRIPT)
    files = {str(request.folder / name): text for name, text in request.files.items()}
    notes = []
    if settings.site.time is None:
        notes.append(
            "no time limit is given: the partition's own holds, and the request to save comes with it"
        )
    if request.vendor is None and not _names_devices(settings.site):
        notes.append(
            "no devices are asked for: the accelerator is not known or is a CPU; else --directive --gpus-per-node=N"
        )
    return Dispatch(
        files=files | {path: script(request, settings)},
        commands=(("sbatch", "--parsable", path),),
        notes=tuple(notes),
    )


def script(request: Request, settings: Settings) -> str:
    """The text of the sbatch script."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(request, settings)),
        "",
        "set -uo pipefail",
        *_exports(request),
        *settings.site.setup,
        "",
        _step(request, settings),
        _ending(request),
    ]
    return "\n".join(lines)


def _options(request: Request, settings: Settings) -> Iterator[str]:
    site = settings.site
    yield f"--job-name={_word('name', request.name)}"
    yield f"--nodes={request.num_nodes}"
    yield f"--ntasks-per-node={request.devices_per_node}"
    if request.vendor is not None and not _names_devices(site):
        yield f"--gpus-per-node={request.devices_per_node}"
    if site.cpus_per_task is not None:
        yield f"--cpus-per-task={site.cpus_per_task}"
    if site.exclusive:
        yield "--exclusive"
    for key in ("partition", "account", "qos"):
        if (value := getattr(site, key)) is not None:
            yield f"--{key}={_word(key, value)}"
    if site.time is not None:
        if not TIME.fullmatch(site.time):
            raise InputError("time", got=site.time, allowed="minutes, HH:MM:SS or D-HH:MM:SS")
        yield f"--time={site.time}"
    if request.exclude:
        yield f"--exclude={','.join(request.exclude)}"
    yield f"--chdir={_word('the working folder', str(settings.workdir))}"
    yield f"--output={_word('the results folder', str(request.folder))}/{LOGS}/slurm-%j.log"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{site.stop_ahead_s}"
    for directive in site.directives:
        name = directive.partition("=")[0].split(" ")[0]
        if not name.startswith("--") or not directive.isprintable():
            raise InputError("a directive is an option of sbatch", got=directive, allowed="--name=value")
        if name in OWN_OPTIONS and name != "--gpus-per-node":
            raise InputError("this option of sbatch follows from the run", got=directive)
        yield directive


def _names_devices(site: SlurmSite) -> bool:
    return any(d.startswith(("--gpus", "--gres")) for d in site.directives)


def _exports(request: Request) -> Iterator[str]:
    yield from (f"export {v.name}={shlex.quote(v.value)}" for v in request.environment)
    yield f"export WORLD_SIZE={request.num_processes}"
    yield f"export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
    before = " + 1" if request.resume else ""
    yield f"export {RESTARTS}=$((${{SLURM_RESTART_COUNT:-0}}{before}))"


def _step(request: Request, settings: Settings) -> str:
    """One task a device. Each takes its place from Slurm, in a shell of its own that becomes the process."""
    site, folder = settings.site, shlex.quote(str(request.folder))
    srun = [
        "srun", "--kill-on-bad-exit=0", f"--wait={GRACE_S}", "--cpu-bind=none",
        f"--output={folder}/{LOGS}/rank-%5t.log", "--open-mode=append",
    ]  # fmt: skip
    if site.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={site.cpus_per_task}")
    inner = [settings.python if word == "python" else word for word in request.argv]
    if site.container is not None:
        mounts = [f"{settings.workdir}:{settings.workdir}", *site.mounts]
        if site.runtime is Runtime.PYXIS:
            srun += [
                shlex.quote(f"--container-image={site.container}"),
                shlex.quote(f"--container-mounts={','.join(mounts)}"),
                shlex.quote(f"--container-workdir={settings.workdir}"),
            ]
        else:
            inner = [
                "apptainer", "exec", *_devices_of(request.vendor), "--bind", ",".join(mounts),
                "--pwd", str(settings.workdir), site.container, *inner,
            ]  # fmt: skip
    body = "; ".join(RANK_WORDS.strip().splitlines())
    return "\n".join([
        f"mkdir -p {folder}/{LOGS}",
        "# shellcheck disable=SC2016 # each task has its own values",
        f"{' '.join(srun)} \\\n  bash -c '{body}' rank \\\n  {shlex.join(inner)} &",
    ])  # fmt: skip


def _devices_of(vendor: str | None) -> tuple[str, ...]:
    return {"NVIDIA": ("--nv",), "AMD": ("--rocm",)}.get(vendor or "", ())


def _ending(request: Request) -> str:
    """Wait, pass the request to save on, and decide what follows."""
    failures = shlex.quote(str(request.folder / FAILURES))
    return f"""\
step=$!
is_asked=no
# shellcheck disable=SC2317 # the trap calls it
save() {{ # the time limit comes near, or the job is preempted
  is_asked=yes
  kill -USR1 "$step" # srun passes it on to every process
}}
trap save USR1

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends the wait, not the step
  code=0
  wait "$step" || code=$?
done
trap '' USR1

requeue() {{
  # A job that was cancelled is no longer running, and stays so.
  if scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
    echo "$1: queued again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}}

if [[ ${{SLURM_RESTART_COUNT:-0}} -eq 0 ]]; then rm -f {failures}; fi # of an earlier job
failures=$(cat {failures} 2>/dev/null || echo 0)
if [[ $code -eq 0 ]]; then
  echo "done"
elif [[ $is_asked == yes ]]; then
  requeue "stopped with a checkpoint"
elif [[ $code -eq 2 || $code -eq 3 ]]; then
  echo "exit code $code: starting again would not help"
elif [[ $failures -lt {request.max_restarts} ]]; then
  echo $((failures + 1)) >{failures}
  requeue "exit code $code, failure $((failures + 1)) of {request.max_restarts} that are allowed"
else
  echo "exit code $code, and no restart is left"
fi
exit "$code"
"""


def _word(what: str, value: str) -> str:
    """A value of an #SBATCH line, which ends at a space."""
    if not value or not value.isprintable() or any(c in " \"'#\\" for c in value):
        raise InputError(
            f"{what} cannot stand in a line of sbatch", got=value, allowed="no spaces, no quotes"
        )
    return value
