"""The site file: settings of one cluster, kept out of run files.

    environment: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: null}     null removes a variable
    interface: ens1f0                    the network interface between nodes
    slurm: {partition: gpu, account: llm, time: "24:00:00"}
    kubernetes: {image: registry.example/train:1, claims: [{name: shared, mount: /results}]}

docs/guides/launch.md explains every key.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import nearest
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


class VolumeClaim(_Section):
    """A persistent volume claim and where it is mounted."""

    name: str
    mount: str


class KubernetesSite(_Section):
    """Kubernetes section: options of the job and its pods."""

    kind: KubernetesJobKind = Field(default=KubernetesJobKind.PYTORCHJOB, strict=False)
    namespace: str | None = None
    image: str | None = None
    workdir: str | None = None  # None: the first claim
    claims: tuple[VolumeClaim, ...] = Field(default=(), strict=False)
    shared_memory: str = "64Gi"
    cpu: str | None = None  # per pod
    memory: str | None = None
    device_resource: str | None = None  # None: the vendor's usual one
    rdma_resource: str | None = None  # such as rdma/hca
    rdma_count: int = Field(default=1, ge=1)
    host_network: bool = False
    host_ipc: bool = False
    queue: str | None = None  # a local queue of Kueue
    priority_class: str | None = None
    scheduler: str | None = None  # of pods, such as volcano; None: the cluster's own
    service_account: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict)  # of pods, such as networks of Multus
    secrets: tuple[str, ...] = Field(default=(), strict=False)  # all of their keys are variables of the processes
    pull_secrets: tuple[str, ...] = Field(default=(), strict=False)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    stop_ahead_s: int = Field(default=120, ge=1)  # between the request to save and the kill


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


def _problem(error: Any) -> RunFileProblem:
    path = tuple(error["loc"])
    if error["type"] != "extra_forbidden":
        return RunFileProblem(path=path, message=error["msg"][:1].lower() + error["msg"][1:], got=error["input"])
    known = _known(path[:-1])
    near = nearest(str(path[-1]), known)
    hint = f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"
    return RunFileProblem(path=path, message="unknown key", hint=hint, meant=near)


def _known(path: tuple[str | int, ...]) -> list[str]:
    sections = {(): Site, ("slurm",): SlurmSite, ("kubernetes",): KubernetesSite}
    return sorted(sections.get(path, VolumeClaim).model_fields)
