"""The site file: settings of one cluster, kept out of run files.

    environment: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: null}     null removes a variable
    interface: ens1f0                    the network interface between nodes
    slurm: {partition: gpu, account: llm, time: "24:00:00"}
    kubernetes: {image: registry.example/train:1, claims: [{name: shared, mount: /results}]}

docs/guides/launch.md explains every key.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from meshwright.errors import InputError, nearest
from meshwright.runfile import document as documents
from meshwright.runfile.problems import RunFileProblem


class ContainerRuntime(StrEnum):
    """Container runtime under Slurm."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


class KubernetesJobKind(StrEnum):
    """Kind of the Kubernetes job."""

    PYTORCHJOB = "pytorchjob"  # Kubeflow training operator, kubeflow.org/v1
    JOBSET = "jobset"  # kubernetes-sigs/jobset, jobset.x-k8s.io/v1alpha2
    TRAINJOB = "trainjob"  # Kubeflow Trainer 2, trainer.kubeflow.org/v1alpha1
    RAYJOB = "rayjob"  # KubeRay, ray.io/v1


_DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _like(what: str, pattern: str, *, most: int = 253) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) > most or not re.fullmatch(pattern, text):
            raise ValueError(f"is no {what}")
        return text

    return AfterValidator(check)


# What the API server accepts: Kubernetes documentation, Object Names and IDs; Labels and Selectors; Quantity.
Label = Annotated[str, _like("name of lower case letters, digits and dashes", _DNS, most=63)]
Subdomain = Annotated[str, _like("name of lower case letters, digits, dashes and dots", rf"{_DNS}(\.{_DNS})*")]
QualifiedName = Annotated[str, _like("name such as example.com/name", rf"({_DNS}(\.{_DNS})*/)?{_WORD}", most=317)]
LabelValue = Annotated[str, _like("value of a label: letters, digits, dashes, dots", rf"({_WORD})?")]
Quantity = Annotated[str, _like("quantity such as 64Gi, 96 or 500m", r"\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i|[eE]\d+)?")]
Image = Annotated[str, _like("name of an image", r"\S+", most=4096)]
Mount = Annotated[str, _like("absolute path without a colon", r"/[^:\n]*", most=4096)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SlurmSite(_Section):
    """Slurm section: options of sbatch and srun."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus_per_task: int | None = Field(default=None, ge=1)
    exclusive: bool = True
    container: str | None = None  # image: a name for pyxis, a path for apptainer
    runtime: ContainerRuntime = Field(default=ContainerRuntime.PYXIS, strict=False)
    mounts: tuple[str, ...] = Field(default=(), strict=False)  # SOURCE:TARGET
    directives: tuple[str, ...] = Field(default=(), strict=False)  # further options of sbatch
    setup: tuple[str, ...] = Field(default=(), strict=False)  # lines of bash before the start: modules
    stop_ahead_s: int = Field(default=120, ge=1)  # between the request to save and the end of the time limit


class Toleration(_Section):
    """A taint of nodes on which pods may run."""

    key: QualifiedName | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    seconds: int | None = Field(default=None, alias="tolerationSeconds")


class VolumeClaim(_Section):
    """A persistent volume claim and where it is mounted."""

    name: Subdomain
    mount: Mount


class KubernetesSite(_Section):
    """Kubernetes section: options of the job and its pods."""

    kind: KubernetesJobKind = Field(default=KubernetesJobKind.PYTORCHJOB, strict=False)
    namespace: Label | None = None
    image: Image | None = None
    workdir: Mount | None = None  # None: the first claim
    claims: tuple[VolumeClaim, ...] = Field(default=(), strict=False)
    shared_memory: Quantity = "64Gi"
    cpu: Quantity | None = None  # per pod
    memory: Quantity | None = None
    device_resource: QualifiedName | None = None  # None: the vendor's usual one
    rdma_resource: QualifiedName | None = None  # such as rdma/hca
    rdma_count: int = Field(default=1, ge=1)
    host_network: bool = False
    host_ipc: bool = False
    queue: LabelValue | None = None  # a local queue of Kueue
    priority_class: Subdomain | None = None
    scheduler: Subdomain | None = None  # of pods, such as volcano; None: the cluster's own
    service_account: Subdomain | None = None
    annotations: dict[QualifiedName, str] = Field(default_factory=dict)  # of pods, such as networks of Multus
    secrets: tuple[Subdomain, ...] = Field(default=(), strict=False)  # all of their keys are variables of the processes
    pull_secrets: tuple[Subdomain, ...] = Field(default=(), strict=False)
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = Field(default=(), strict=False)
    stop_ahead_s: int = Field(default=120, ge=1)  # between the request to save and the kill

    @field_validator("claims")
    @classmethod
    def _once(cls, claims: tuple[VolumeClaim, ...]) -> tuple[VolumeClaim, ...]:
        mounts = [claim.mount for claim in claims]
        if twice := next((mount for mount in mounts if mounts.count(mount) > 1), None):
            raise ValueError(f"two claims are mounted at {twice}")
        return claims


class SkyPilotSite(_Section):
    """SkyPilot section: options of the task and its machines."""

    infra: str | None = None  # cloud/region/zone
    accelerator: str | None = None  # as SkyPilot names it
    spot: bool = False
    image: Image | None = None
    buckets: dict[Mount, str] = Field(default_factory=dict)  # folder -> address of a bucket
    volumes: dict[Mount, str] = Field(default_factory=dict)  # folder -> name of a volume
    setup: tuple[str, ...] = Field(default=(), strict=False)  # lines of shell, once on each machine

    @property
    def mounts(self) -> tuple[str, ...]:
        """Folders that outlive the machines."""
        return *self.buckets, *self.volumes


class RaySite(_Section):
    """Ray section."""

    address: str | None = None  # of the cluster; None: RAY_ADDRESS


class Site(_Section):
    """The whole site file."""

    environment: dict[str, str | None] = Field(default_factory=dict)
    interface: str | None = None
    rdma_devices: str | None = None
    gid_index: int | None = Field(default=None, ge=0)
    python: str | None = None  # the interpreter on every host
    numa: bool = False  # bind each process to the NUMA node of its device
    slurm: SlurmSite = SlurmSite()
    kubernetes: KubernetesSite = KubernetesSite()
    skypilot: SkyPilotSite = SkyPilotSite()
    ray: RaySite = RaySite()


def read_site(path: Path) -> Site:
    """Read the site file at `path`. Raises RunFileError with all problems, by line."""
    document = documents.parse(documents.read_text(path), file=str(path))
    try:
        site = Site.model_validate(document.value)
    except ValidationError as errors:
        found = [_problem(error) for error in errors.errors(include_url=False)]
        raise document.error([*document.problems, *found]) from None
    if document.problems:
        raise document.error(list(document.problems))
    return site


def with_options(site: Site, *, slurm: dict[str, Any], kubernetes: dict[str, Any]) -> Site:
    """Return `site` with values of the command line. Raises InputError for one that the site file may not have."""
    values = site.model_dump(by_alias=True)
    values["slurm"] |= slurm
    values["kubernetes"] |= kubernetes
    try:
        return Site.model_validate(values)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        raise InputError(f"--{error['loc'][1]} {_message(error)}", got=error["input"]) from None


def _problem(error: Any) -> RunFileProblem:
    path = tuple(error["loc"])
    if error["type"] != "extra_forbidden":
        return RunFileProblem(path=path, message=_message(error), got=error["input"])
    known = _known(path[:-1])
    near = nearest(str(path[-1]), known)
    hint = f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"
    return RunFileProblem(path=path, message="unknown key", hint=hint, meant=near)


_LISTED = {"tolerations": Toleration, "claims": VolumeClaim}


def _message(error: Any) -> str:
    text = error["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _known(path: tuple[str | int, ...]) -> list[str]:
    found: Any = Site
    for key in path:  # a field of a section, or an entry of a list
        found = found if isinstance(key, int) else _LISTED.get(key) or type(found.model_fields[key].default)
    return sorted(field.alias or name for name, field in found.model_fields.items())
