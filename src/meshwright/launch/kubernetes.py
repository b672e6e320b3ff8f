"""A ConfigMap with the run's files, and a resource with one pod per node and torchrun in each.

It is a JobSet, a TrainJob, a PyTorchJob or a RayJob.

The job is created, not applied: an existing job is left unchanged and reported as an error. The ConfigMap and the
runtime of a TrainJob are named by their content, so that restarted pods never see those of a later run.

The controller restarts pods: the failed pod (PyTorchJob), or all of them (JobSet, TrainJob). They find the checkpoints
on a persistent volume. SIGTERM, which precedes the end of a pod, saves a checkpoint. Of a RayJob the script starts
torchrun again, and Ray answers SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.json_values import dump_yaml
from meshwright.launch import ray
from meshwright.launch.local import PORT, torchrun
from meshwright.launch.request import RESTARTS, Dispatch, LaunchRequest
from meshwright.launch.site import KubernetesJobKind, KubernetesSite

MANIFEST, CONFIG = "manifest.yaml", "run-files.yaml"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi", "Google": "google.com/tpu"}
"""Resource names of the vendors' device plugins."""

FILES, FILES_FOLDER = "run-files", "/run-files"
MAX_NAME = 40  # names of pods are longer, and limited to 63

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Kubernetes settings of the site file, and this machine's folder of the manifest."""

    site: KubernetesSite
    python: str
    here: Path  # folder of the manifest on this machine; `LaunchRequest.folder` is that of the pods


def dispatch(request: LaunchRequest, settings: KubernetesSettings) -> Dispatch:
    """Return the manifest and the command that applies it. Pure.

    Raises InputError when no image is named, or the results would be lost with the pods.
    """
    site = settings.site
    if site.image is None:
        raise InputError("Kubernetes needs an image", hint="--image NAME, or kubernetes.image in the site file")
    mounts, hint = [claim.mount for claim in site.claims], "kubernetes.claims: [{name: CLAIM, mount: FOLDER}]"
    require_kept(request, Path(workdir(site)), mounts, hint=f"{hint} in the site file")
    *applied, job = documents(request, settings)
    config = "---\n".join(map(yaml_text, applied))
    texts = {str(settings.here / CONFIG): config, str(settings.here / MANIFEST): yaml_text(job)}
    notes = []
    if request.vendor is None:
        notes.append("no devices are requested: the accelerator is unknown, or is a CPU")
    if site.rdma_resource is None and request.num_nodes > 1:
        notes.append(
            "no RDMA device is requested (kubernetes.rdma_resource): pods communicate over their default network"
        )
    if site.kind is KubernetesJobKind.RAYJOB:
        notes.append(f"{site.image} needs Ray (pip install 'ray[default]')")
    namespace = ("--namespace", site.namespace) if site.namespace else ()
    commands = tuple(
        ("kubectl", what, *namespace, "-f", path) for what, path in zip(("apply", "create"), texts, strict=True)
    )
    return Dispatch(files=texts, commands=commands, notes=tuple(notes))


def workdir(site: KubernetesSite) -> str:
    """Return the working folder of processes: the mount of the first claim, so that results outlive the pods."""
    return site.workdir or (site.claims[0].mount if site.claims else "/")


def require_kept(request: LaunchRequest, workdir: Path, mounts: Sequence[str], *, hint: str) -> None:
    """Raise InputError for results or checkpoints that are on no mount, and so are lost at the end."""
    checkpoints = {} if request.checkpoints is None else {"checkpoints": workdir / request.checkpoints}
    for what, folder in ({"the results": request.folder} | checkpoints).items():
        if not any(folder.is_relative_to(mount) for mount in mounts):
            allowed = ", ".join(f"below {mount}" for mount in mounts) or None
            raise InputError(
                f"{what} would be lost: nothing is mounted there", got=str(folder), allowed=allowed, hint=hint
            )


def documents(request: LaunchRequest, settings: KubernetesSettings) -> tuple[Values, ...]:
    """Return the API objects: the ConfigMap, the runtime of a TrainJob, and the job as the last one."""
    name = resource_name(request.name)
    if settings.site.kind is KubernetesJobKind.RAYJOB:
        # A head that was lost begins the script again, which cannot know it: it always resumes.
        text = ray.script(
            replace(request, resume=True), python=settings.python, workdir=Path(workdir(settings.site))
        )  # fmt: skip
        request = replace(request, files={**request.files, ray.SCRIPT: text})
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _files_name(name, request), **given(namespace=settings.site.namespace)},
        "immutable": True,
        "data": {_key(path): text for path, text in request.files.items()},
    }
    if settings.site.kind is KubernetesJobKind.PYTORCHJOB:
        return config, _pytorchjob(name, request, settings)
    if settings.site.kind is KubernetesJobKind.RAYJOB:
        return config, _rayjob(name, request, settings)
    jobset = _jobset(name, request, settings)
    return config, *((jobset,) if settings.site.kind is KubernetesJobKind.JOBSET else _trainjob(jobset, request))


def resource_name(name: str) -> str:
    """Return a valid Kubernetes name: lower case, digits and dashes.

    >>> resource_name("Llama 3.1_8B")
    'llama-3-1-8b'
    """
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower())[:MAX_NAME].strip("-")
    return cleaned if cleaned[:1].isalpha() else f"run-{cleaned}".strip("-")


def _files_name(name: str, request: LaunchRequest) -> str:
    return _named_by_content(name, sorted(request.files.items()))


def _named_by_content(name: str, content: object) -> str:
    return f"{name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"


def _pytorchjob(name: str, request: LaunchRequest, settings: KubernetesSettings) -> Values:
    """Return a PyTorchJob. The operator sets the rank of each node and the address of the first.

    The operator sums the restarts of all containers, and a lost process restarts every pod once. The job
    fails when the sum is `backoffLimit` (kubeflow/training-operator, pkg/core/job.go, PastBackoffLimit).
    `restartPolicy: ExitCode` would end the job at once on bad input, but on every other exit code below 128
    too. It would retry without limit on exit codes above: it recreates these pods and counts no restart
    (pkg/controller.v1/common/pod.go, ReconcilePods).
    """
    # A restarted container cannot know that it was: always resume from the newest checkpoint, if there is one.
    environment = [{"name": RESTARTS, "value": "1"}]

    def replicas(count: int) -> Values:
        pod = _pod(name, request, settings, container="pytorch", environment=environment)
        return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}

    specs = {"Master": replicas(1)}
    if request.num_nodes > 1:
        specs["Worker"] = replicas(request.num_nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(name, settings.site),
        "spec": {
            "nprocPerNode": str(request.devices_per_node),
            "runPolicy": {"backoffLimit": request.max_restarts * request.num_nodes + 1, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": specs,
        },
    }


def _jobset(name: str, request: LaunchRequest, settings: KubernetesSettings) -> Values:
    """Return a JobSet of one indexed job. The index of a pod is its node rank; the first pod has a fixed host name."""
    restarts = {"name": RESTARTS, "value": "1"} if request.resume else _field(
        RESTARTS, "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    )  # fmt: skip
    environment = [
        restarts,
        _field("PET_NODE_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    pod = _pod(name, request, settings, container="node", environment=environment)
    pod["spec"]["restartPolicy"] = "Never"
    codes = {  # bad input and missing packages end the job: a restart would not help
        "containerName": "node",
        "operator": "In",
        "values": [InputError.exit_code, MissingDependencyError.exit_code],
    }
    job = {
        "parallelism": request.num_nodes,
        "completions": request.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": pod,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, settings.site),
        "spec": {
            "failurePolicy": {
                "maxRestarts": request.max_restarts,
                "rules": [{"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _trainjob(jobset: Values, request: LaunchRequest) -> tuple[Values, Values]:
    """Return a TrainingRuntime with the template of `jobset`, and the TrainJob that starts it.

    The runtime holds all of the pod: a TrainJob may patch few of a runtime's fields (kubeflow/trainer v2.3.0,
    pkg/apis/trainer/v1alpha1/trainjob_types.go, PodSpecPatch). Its job and container are called `node` and have the
    label of the trainer, and the plugin of torchrun sets the ranks and the address that the JobSet has
    (pkg/runtime/framework/plugins/torch/torch.go).
    """
    jobset["spec"]["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    spec = {"mlPolicy": {"numNodes": request.num_nodes, "torch": {}}, "template": {"spec": jobset["spec"]}}
    metadata = {key: value for key, value in jobset["metadata"].items() if key != "labels"}
    metadata["name"] = _named_by_content(metadata["name"], spec)
    runtime = {"apiVersion": TRAINER_API, "kind": "TrainingRuntime", "metadata": metadata, "spec": spec}
    job = {
        "apiVersion": TRAINER_API, "kind": "TrainJob", "metadata": jobset["metadata"],
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": metadata["name"]},
            "trainer": {"numNodes": request.num_nodes, "numProcPerNode": request.devices_per_node},
        },
    }  # fmt: skip
    return runtime, job


def _rayjob(name: str, request: LaunchRequest, settings: KubernetesSettings) -> Values:
    """Return a RayJob: a cluster of a head without devices and a worker per node, and the script that it runs.

    The operator submits the script itself (HTTPMode): its own pod for that would have none of the site's settings, such
    as pull secrets (kuberay v1.7.0, ray-operator/controllers/ray/common/job.go, GetSubmitterTemplate).
    """
    nothing = {"cpu": None, "memory": None, "device_resource": None, "rdma_resource": None}
    of_head = settings.site.model_copy(update={**nothing, "host_network": False, "host_ipc": False})
    devices = ray.devices(request)
    known = {"num-gpus": str(devices["GPU"])} if "GPU" in devices else given(
        resources=devices and f"'{json.dumps(devices)}'"
    )  # fmt: skip

    def group(request: LaunchRequest, settings: KubernetesSettings, start: Values) -> Values:
        # The script gives torchrun its environment.
        pod = _pod(name, replace(request, environment=()), settings, container="ray", environment=[])
        del pod["spec"]["containers"][0]["command"]  # the operator's own starts Ray
        return {"rayStartParams": start, "template": pod}

    head = group(replace(request, vendor=None), replace(settings, site=of_head), {"num-cpus": "0"})
    nodes = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), request.num_nodes)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(name, settings.site),
        "spec": {
            "entrypoint": shlex.join((settings.python, str(request.folder / ray.SCRIPT))),
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": head,
                "workerGroupSpecs": [{"groupName": "node", **nodes, **group(request, settings, known)}],
            },
        },
    }


def _pod(
    name: str, request: LaunchRequest, settings: KubernetesSettings, *, container: str, environment: list[Values]
) -> Values:
    site = settings.site
    mounts, volumes = _storage(name, request, site)
    locks = site.rdma_resource or site.host_network  # RDMA locks memory, which many namespaces forbid
    wanted = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(request.exclude)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    limits = {
        site.device_resource or RESOURCES.get(request.vendor or ""): request.devices_per_node,
        site.rdma_resource: site.rdma_count,
        "cpu": site.cpu,
        "memory": site.memory,
    }
    main: Values = {
        "name": container,
        "image": site.image,
        "command": [_literal(argument) for argument in torchrun(request, settings.python)],
        "workingDir": workdir(site),
        "env": [{"name": v.name, "value": _literal(v.value)} for v in request.environment]
        + [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(max(1, site.stop_ahead_s - 10))}]
        + environment,
        "resources": {"limits": {key: value for key, value in limits.items() if key and value}},
        "volumeMounts": mounts,
    } | given(
        securityContext=locks and {"capabilities": {"add": ["IPC_LOCK"]}},
        envFrom=[{"secretRef": {"name": secret}} for secret in site.secrets],
    )
    spec: Values = {
        "initContainers": [_copy_files(request, site)] if request.files else [],
        "containers": [main],
        "volumes": volumes,
        "terminationGracePeriodSeconds": site.stop_ahead_s,
    } | given(
        hostNetwork=site.host_network,
        dnsPolicy=site.host_network and "ClusterFirstWithHostNet",
        hostIPC=site.host_ipc,
        serviceAccountName=site.service_account,
        priorityClassName=site.priority_class,
        schedulerName=site.scheduler,
        imagePullSecrets=[{"name": secret} for secret in site.pull_secrets],
        nodeSelector=dict(site.node_selector),
        tolerations=[t.model_dump(by_alias=True, exclude_none=True) for t in site.tolerations],
        affinity=request.exclude and {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
    )
    return {"metadata": {"labels": {"app": name}, **given(annotations=dict(site.annotations))}, "spec": spec}


def given(**fields: Any) -> Values:
    """Return the fields of an object that are set."""
    return {name: value for name, value in fields.items() if value}


def _literal(text: str) -> str:
    """Escape `text` so that Kubernetes expands no $(NAME) in it."""
    return text.replace("$", "$$")


def _storage(name: str, request: LaunchRequest, site: KubernetesSite) -> tuple[list[Values], list[Values]]:
    """Return mounts and volumes: shared memory for data loaders and NCCL, the run's files, and the claims."""
    shared = {"emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}}
    claims = enumerate(dict.fromkeys(claim.name for claim in site.claims))
    volumes: list[Values] = [
        {"name": "shared-memory", **shared},
        *({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, claim in claims),
        *([{"name": FILES, "configMap": {"name": _files_name(name, request)}}] if request.files else []),
    ]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *_claims(site)], volumes


def _claims(site: KubernetesSite) -> list[Values]:
    """Return the mounts of the claims. Volumes are numbered, because a claim's name may have dots."""
    names = list(dict.fromkeys(claim.name for claim in site.claims))
    return [{"name": f"claim-{names.index(claim.name)}", "mountPath": claim.mount} for claim in site.claims]


def _copy_files(request: LaunchRequest, site: KubernetesSite) -> Values:
    """Return the container that copies the run's files from the ConfigMap to the results folder, each atomically."""
    lines = ["set -e"]
    for path in request.files:
        target = shlex.quote(str(request.folder / path))
        lines.append(f"mkdir -p {shlex.quote(str((request.folder / path).parent))}")
        lines.append(f'cp {FILES_FOLDER}/{_key(path)} {target}."$HOSTNAME"')
        lines.append(f'mv {target}."$HOSTNAME" {target}')
    return {
        "name": "files", "image": site.image, "command": ["sh", "-c", _literal("\n".join(lines))],
        "volumeMounts": [{"name": FILES, "mountPath": FILES_FOLDER}, *_claims(site)],
    }  # fmt: skip


def _field(name: str, path: str) -> Values:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _metadata(name: str, site: KubernetesSite) -> Values:
    labels = site.queue and {"kueue.x-k8s.io/queue-name": site.queue}
    return {"name": name, **given(namespace=site.namespace, labels=labels)}


def _key(path: str) -> str:
    """A path as the key of a ConfigMap, which has no slashes."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path)


def yaml_text(document: Values) -> str:
    """Return a document as YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import LiteralScalarString

    if "data" in document:
        document = document | {"data": {k: LiteralScalarString(v) for k, v in document["data"].items()}}
    document = document | {k: LiteralScalarString(document[k]) for k in ("setup", "run") if k in document}
    yaml = YAML()
    yaml.representer.ignore_aliases = lambda data: True  # what stands in two places is written twice
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    return dump_yaml(document, yaml=yaml)
