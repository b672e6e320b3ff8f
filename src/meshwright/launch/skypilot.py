"""A SkyPilot task, submitted as a managed job, with torchrun on each machine.

SkyPilot starts the task again, on new machines, that was preempted, and at most `max_restarts` times one that failed.
Its processes cannot know that, and always resume from the newest checkpoint in the mounted bucket or volume.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.launch.kubernetes import given, require_kept, yaml_text
from meshwright.launch.local import PORT, torchrun
from meshwright.launch.request import RESTARTS, Dispatch, LaunchRequest
from meshwright.launch.site import SkyPilotSite

TASK = "task.yaml"
_DATA = Path(__file__).parent / "data"


def dispatch(request: LaunchRequest, site: SkyPilotSite, *, python: str, here: Path) -> Dispatch:
    """Return the task, the run's files and the command that submits the task. Pure.

    here   folder of the task on this machine; `request.folder` is that of the processes

    Raises InputError for an accelerator without a name there, and results that would be lost.
    """
    workdir = (*site.mounts, "/")[0]
    require_kept(request, Path(workdir), site.mounts, hint="skypilot.buckets: {FOLDER: s3://BUCKET} in the site file")
    devices = _name(request, site)
    quoted = {"folder": str(request.folder), "workdir": workdir}
    start = (_DATA / "skypilot.sh").read_text(encoding="utf-8").format(
        port=PORT, torchrun=shlex.join(torchrun(request, python)),
        **{name: shlex.quote(text) for name, text in quoted.items()},
    )  # fmt: skip
    task = given(
        name=request.name, num_nodes=request.num_nodes, volumes=site.volumes, setup="\n".join(site.setup), run=start,
        resources=given(
            infra=site.infra, use_spot=site.spot, image_id=site.image and f"docker:{site.image}",
            accelerators=devices and {devices: request.devices_per_node},
            job_recovery={"max_restarts_on_errors": request.max_restarts},
        ),
        envs={v.name: v.value for v in request.environment} | {RESTARTS: "1"},
        file_mounts={folder: {"source": bucket, "mode": "MOUNT"} for folder, bucket in site.buckets.items()}
        | {f"~/run-files/{path}": str(here / path) for path in request.files},
    )  # fmt: skip
    files = {str(here / path): text for path, text in (*request.files.items(), (TASK, yaml_text(task)))}
    notes = () if devices else ("no devices are requested: the accelerator is unknown, or is a CPU",)
    return Dispatch(
        files=files, commands=(("sky", "jobs", "launch", "--yes", "--detach-run", str(here / TASK)),), notes=notes
    )


def _name(request: LaunchRequest, site: SkyPilotSite) -> str | None:
    """SkyPilot's name of the accelerator; None: no devices are requested."""
    names = toml_table(_DATA / "skypilot.toml")["accelerators"]
    name = site.accelerator or names.get(request.accelerator)
    if name is None and request.accelerator is not None:
        raise InputError(
            "SkyPilot's name of this accelerator is not known", got=request.accelerator, allowed=", ".join(names),
            hint="skypilot.accelerator in the site file; `sky gpus list --all` has the names",
        )  # fmt: skip
    return name
