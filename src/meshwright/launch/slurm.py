"""One sbatch script: one task per device, directly under srun.

    the time limit comes near, or Slurm preempts    SIGUSR1, SIGTERM -> every process saves and ends -> requeued
    a process is lost                               all end -> requeued, at most `max_restarts` times
    a node is lost                                  Slurm requeues the job
    bad input, a package is missing                 the job ends: a restart would not help

A requeued job resumes from its checkpoints, because MESHWRIGHT_RESTARTS counts earlier starts. `scancel` ends it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.request import RESTARTS, Dispatch, LaunchRequest
from meshwright.launch.site import ContainerRuntime, SlurmSite
from meshwright.training.signals import STOPPED_EXIT_CODE

SCRIPT = "submit.sh"
LOGS = "logs"
FAILURES = "failures"
GRACE_S = 120
"""Time for the other processes after one has ended: to write their results, or to notice a lost process."""

FIRST_PORT, NUM_PORTS = 15000, 15000  # below Linux's ephemeral ports
OWN_OPTIONS = (
    "--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node", "--requeue", "--no-requeue", "--signal",
    "--output", "--error", "--open-mode", "--chdir", "--exclude", "--job-name", "--array",
)  # fmt: skip
OF_DEVICES: dict[str | None, tuple[str, ...]] = {"NVIDIA": ("--nv",), "AMD": ("--rocm",)}
TIME = re.compile(r"((?P<days>\d+)-)?\d+(:\d\d){0,2}")
UNLIMITED = ("unlimited", "infinite")

RANK_VARIABLES = """\
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Slurm settings of the site file, and the folder of the job."""

    site: SlurmSite
    python: str
    workdir: Path


def dispatch(request: LaunchRequest, settings: SlurmSettings) -> Dispatch:
    """Return the script, the run's files, and the command that submits the script. Pure.

    Raises InputError for values that sbatch would misread, and for results that would be lost with a container.
    """
    if settings.site.container is not None and request.checkpoints is not None:
        folder = settings.workdir / request.checkpoints
        targets = [str(settings.workdir), *(m.split(":")[1] for m in settings.site.mounts if ":" in m)]
        if not any(folder.is_relative_to(target) for target in targets):
            raise InputError(
                "checkpoints would be lost with the container: nothing is mounted there", got=str(folder),
                allowed=", ".join(f"below {target}" for target in targets),
                hint="slurm.mounts: [SOURCE:TARGET] in the site file",
            )  # fmt: skip
    path = str(request.folder / SCRIPT)
    files = {str(request.folder / name): text for name, text in request.files.items()}
    notes = []
    if settings.site.time is None:
        notes.append("no time limit is given: the partition's applies, and the request to save comes before it")
    if request.vendor is None and not _names_devices(settings.site):
        notes.append(
            "no devices are requested: the accelerator is unknown or is a CPU; else --directive --gpus-per-node=N"
        )
    return Dispatch(
        files=files | {path: script(request, settings)}, commands=(("sbatch", "--parsable", path),), notes=tuple(notes)
    )


def script(request: LaunchRequest, settings: SlurmSettings) -> str:
    """Return the text of the sbatch script. It waits, passes on the request to save, and requeues if that helps.

    An engine that does not handle the request is killed by it, and resumes from its newest checkpoint.
    """
    stopped = 'requeue "asked to stop"'
    if request.checkpoints is None:
        stopped = 'echo "asked to stop, and the run saves no checkpoints: starting again would begin anew"'
    text = (Path(__file__).parent / "data" / "slurm.sh").read_text(encoding="utf-8")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(request, settings)),
        "",
        *settings.site.setup,  # modules read variables that may not be set
        "set -uo pipefail",
        *_exports(request),
        "",
        text.format(
            step=_step(request, settings), failures=shlex.quote(str(request.folder / FAILURES)), stopped=stopped,
            stopped_code=STOPPED_EXIT_CODE, most=request.max_restarts,
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _options(request: LaunchRequest, settings: SlurmSettings) -> Iterator[str]:
    site = settings.site
    yield f"--job-name={_quoted('name', request.name)}"
    yield f"--nodes={request.num_nodes}"
    yield f"--ntasks-per-node={request.devices_per_node}"
    if request.vendor is not None and not _names_devices(site):
        yield f"--gpus-per-node={request.devices_per_node}"
    if site.cpus_per_task is not None:
        yield f"--cpus-per-task={site.cpus_per_task}"
    if site.exclusive:
        yield "--exclusive"
        if not any(d.startswith("--mem") for d in site.directives):
            yield "--mem=0"  # all memory: --exclusive alone gives the requested amount
    for key in ("partition", "account", "qos"):
        if (value := getattr(site, key)) is not None:
            yield f"--{key}={_quoted(key, value)}"
    if site.time is not None:
        if _seconds(site.time) <= site.stop_ahead_s:
            raise InputError(
                f"the time limit is over before the request to save, {site.stop_ahead_s} s ahead of it",
                got=site.time, hint="a longer --time, or a smaller slurm.stop_ahead_s in the site file",
            )  # fmt: skip
        yield f"--time={site.time}"
    if request.exclude:
        yield f"--exclude={','.join(request.exclude)}"
    yield f"--chdir={_quoted('the working folder', str(settings.workdir))}"
    # Next to the script: Slurm opens it before the script can create a folder
    yield f"--output={_quoted('the results folder', _pattern(request.folder) + '/slurm-%j.log')}"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{site.stop_ahead_s}"
    for directive in site.directives:
        name = directive.partition("=")[0].split(" ")[0]
        if not name.startswith("--") or not directive.isprintable():
            raise InputError("a directive is an option of sbatch", got=directive, allowed="--name=value")
        try:
            parts = shlex.split(directive)
        except ValueError:
            parts = []
        if len(parts) != 1 and not (len(parts) == 2 and "=" not in parts[0]):
            hint = "quote the value: --comment='two words'"
            raise InputError("sbatch would read this as several options, or none", got=directive, hint=hint)
        if name in OWN_OPTIONS and name != "--gpus-per-node":
            raise InputError("this option of sbatch follows from the run", got=directive)
        yield directive


def _names_devices(site: SlurmSite) -> bool:
    return any(d.startswith(("--gpus", "--gres")) for d in site.directives)


def _exports(request: LaunchRequest) -> Iterator[str]:
    yield from (f"export {v.name}={shlex.quote(v.value)}" for v in request.environment)
    yield f"export WORLD_SIZE={request.num_processes}"
    yield f"export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
    before = " + 1" if request.resume else ""
    yield f"export {RESTARTS}=$((${{SLURM_RESTART_COUNT:-0}}{before}))"


def _step(request: LaunchRequest, settings: SlurmSettings) -> str:
    """Return the srun command: one task per device, whose shell sets rank and address and becomes the process."""
    site = settings.site
    srun = [
        # Options of sbatch on the environment, and a shell's variables on the order of ranks, must not apply here.
        "srun", "--export=ALL", "--distribution=block", "--kill-on-bad-exit=0", f"--wait={GRACE_S}",
        "--cpu-bind=none", shlex.quote(f"--output={_pattern(request.folder)}/{LOGS}/rank-%5t.log"),
        "--open-mode=append",
    ]  # fmt: skip
    if site.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={site.cpus_per_task}")
    binding = ("python", "-m", "meshwright.engines.bound") if request.numa else ()
    inner = [settings.python if argument == "python" else argument for argument in (*binding, *request.argv)]
    if site.container is not None:
        # An image's variables override those of the host
        inner = ["env", *(f"{v.name}={v.value}" for v in request.environment), *inner]
        folders = [settings.workdir]  # mounted with the results and the site file's mounts
        if not (settings.workdir / request.folder).is_relative_to(settings.workdir):
            folders.append(request.folder)
        mounts = [*(f"{folder}:{folder}" for folder in folders), *settings.site.mounts]
        if site.runtime is ContainerRuntime.PYXIS:
            srun += [
                shlex.quote(f"--container-image={site.container}"),
                shlex.quote(f"--container-mounts={','.join(mounts)}"),
                shlex.quote(f"--container-workdir={settings.workdir}"),
            ]
        else:
            inner = [
                "apptainer", "exec", *OF_DEVICES.get(request.vendor, ()), "--bind", ",".join(mounts),
                "--pwd", str(settings.workdir), site.container, *inner,
            ]  # fmt: skip
    body = "; ".join(RANK_VARIABLES.strip().splitlines())
    return "\n".join([
        f"mkdir -p {shlex.quote(str(request.folder / LOGS))}",
        "# shellcheck disable=SC2016 # each task has its own values",
        f"{' '.join(srun)} \\\n  bash -c '{body}' rank \\\n  {shlex.join(inner)} &",
    ])  # fmt: skip


def _seconds(time: str) -> float:
    """Return the seconds of a time limit as sbatch reads it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Zero, UNLIMITED and INFINITE ask for no limit.

    >>> _seconds("90"), _seconds("1:30"), _seconds("1-02"), _seconds("0")
    (5400, 90, 93600, inf)
    """
    if time.lower() in UNLIMITED:
        return math.inf
    if not (found := TIME.fullmatch(time)):
        raise InputError("time", got=time, allowed="minutes, HH:MM:SS, D-HH:MM:SS or UNLIMITED")
    parts = [int(part) for part in time.rpartition("-")[2].split(":")]
    if found["days"] or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def _pattern(path: Path) -> str:
    """Escape a path so that Slurm replaces nothing in it."""
    return str(path).replace("%", "%%")


def _quoted(what: str, value: str) -> str:
    """Quote a value of an #SBATCH line, as for a shell."""
    if not value or not value.isprintable():
        raise InputError(f"{what} cannot stand in a line of sbatch", got=value, allowed="printable characters")
    return shlex.quote(value)
