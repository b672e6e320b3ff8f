"""The manifest: its text, and that it is what the definitions of its resources allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from meshwright.errors import InputError, RunFileError
from meshwright.launch.environment import EnvironmentVariable
from meshwright.launch.kubernetes import KubernetesSettings, dispatch, documents, resource_name
from meshwright.launch.site import (
    KubernetesJobKind,
    KubernetesSite,
    Site,
    Toleration,
    VolumeClaim,
    read_site,
    with_options,
)

SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
USUAL = KubernetesSite(
    image="registry.example/train:1", claims=(VolumeClaim(name="shared", mount="/results"),), rdma_resource="rdma/hca"
)
FULL = USUAL.model_copy(
    update={
        "namespace": "llm", "queue": "training", "priority_class": "high", "service_account": "trainer",
        "host_network": True, "host_ipc": True, "memory": "1500Gi", "cpu": "96", "rdma_count": 8,
        "scheduler": "volcano", "annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0,rail-1"},
        "secrets": ("hub-token",), "pull_secrets": ("registry",), "node_selector": {"pool": "gpu"},
        "tolerations": (Toleration(key="gpu", operator="Exists", tolerationSeconds=60),),
    }
)  # fmt: skip


def settings(site, kind):
    return KubernetesSettings(site=site.model_copy(update={"kind": kind}), python="python", here=Path("runs/first"))


@pytest.fixture
def request_there(make_request):
    """The request, its results on the claim."""
    return lambda **fields: make_request(folder=Path("/results/first"), **fields)


@pytest.mark.parametrize("kind", list(KubernetesJobKind))
def test_the_manifest_is_the_golden_one(kind, request_there, is_golden):
    found = dispatch(request_there(), settings(USUAL, kind))
    assert found.commands == (
        ("kubectl", "apply", "-f", "runs/first/run-files.yaml"),
        ("kubectl", "create", "-f", "runs/first/manifest.yaml"),
    )
    is_golden("---\n".join(found.files.values()), f"{kind.value}.yaml")


@pytest.mark.parametrize("kind", list(KubernetesJobKind))
@pytest.mark.parametrize("site", [USUAL, FULL], ids=["usual", "full"])
@pytest.mark.parametrize("change", [{}, {"num_nodes": 1, "exclude": (), "resume": True}, {"vendor": None}])
def test_documents_are_what_the_resources_allow(kind, site, change, request_there):
    for document in documents(request_there(**change), settings(site, kind)):
        jsonschema.validate(document, SCHEMA)


def test_the_text_reads_back_as_the_documents(request_there):
    request = request_there(files={"a/b.yaml": "x: |\n  y\n", "run.yaml": "# none\n\nz: 'é\"'"})
    wanted = documents(request, settings(FULL, KubernetesJobKind.JOBSET))
    text = "---\n".join(dispatch(request, settings(FULL, KubernetesJobKind.JOBSET)).files.values())
    assert list(YAML(typ="safe").load_all(text)) == list(wanted)


def test_no_later_runs_files_reach_pods_that_start_again(request_there):
    names = set()
    for text in ("a: 1\n", "a: 2\n"):
        config, job = documents(request_there(files={"run.yaml": text}), settings(USUAL, KubernetesJobKind.JOBSET))
        assert config["immutable"]
        assert f"'configMap': {{'name': '{config['metadata']['name']}'}}" in str(job)
        assert job["metadata"]["name"] == "first"
        names.add(config["metadata"]["name"])
    assert len(names) == 2


def test_a_trainjob_starts_the_runtime_of_its_own_content(request_there):
    runtimes = set()
    for num_nodes in (2, 4):
        config, runtime, job = documents(request_there(num_nodes=num_nodes), settings(FULL, KubernetesJobKind.TRAINJOB))
        runtimes.add(runtime["metadata"]["name"])
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert job["metadata"] == {
            "name": "first",
            "namespace": "llm",
            "labels": {"kueue.x-k8s.io/queue-name": "training"},
        }
        assert job["spec"]["trainer"] == {"numNodes": num_nodes, "numProcPerNode": 8}
        assert f"'configMap': {{'name': '{config['metadata']['name']}'}}" in str(runtime)
        # The names by which the plugins of Kubeflow Trainer find the trainer's pods.
        (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert replicated["template"]["metadata"]["labels"] == {
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
        }
        assert (replicated["name"], replicated["replicas"]) == ("node", 1)
        (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "node"
    assert len(runtimes) == 2


@pytest.mark.parametrize("kind", list(KubernetesJobKind))
def test_torchrun_binds_the_processes_of_pods(kind, request_there):
    for numa in (False, True):
        manifest = str(documents(request_there(numa=numa), settings(USUAL, kind)))
        assert ("'--numa-binding', 'node'" in manifest.replace("\\'", "'")) is numa  # quoted twice in Ray's script


def ray_job(request, site=USUAL):
    """The script among the files, the pods of the head and of the workers, and the RayJob."""
    config, job = documents(request, settings(site, KubernetesJobKind.RAYJOB))
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return config["data"]["submit.py"], job["spec"]["rayClusterSpec"]["headGroupSpec"], workers, job


def test_a_rayjob_runs_the_script_on_workers_that_have_the_devices(request_there):
    script, head, workers, job = ray_job(request_there(), FULL)
    assert job["spec"]["entrypoint"] == "python /results/first/submit.py"
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert (head["rayStartParams"], workers["rayStartParams"]) == ({"num-cpus": "0"}, {"num-gpus": "8"})
    for group in (head, workers):  # both have the script on the claim; the operator's command starts Ray
        (container,) = group["template"]["spec"]["containers"]
        assert "command" not in container
        assert "submit.py" in str(group["template"]["spec"]["initContainers"])
        assert group["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (of_head,), (of_worker,) = (g["template"]["spec"]["containers"] for g in (head, workers))
    assert of_head["resources"] == {"limits": {}}
    assert of_worker["resources"]["limits"] == {"amd.com/gpu": 8, "rdma/hca": 8, "cpu": "96", "memory": "1500Gi"}
    assert ("hostNetwork" in head["template"]["spec"], workers["template"]["spec"]["hostNetwork"]) == (False, True)
    assert "NUM_NODES, DEVICES, FOLDER = 2, {'GPU': 8}, '/results'" in script
    assert "MAX_RESTARTS, FIRST = 3, 1\n" in script  # a new head begins it again


@pytest.mark.parametrize(
    ("vendor", "start"), [("NVIDIA", {"num-gpus": "8"}), ("Intel", {"resources": "'{\"HPU\": 8}'"}), (None, {})]
)
def test_workers_say_to_ray_which_devices_they_have(vendor, start, request_there):
    assert ray_job(request_there(vendor=vendor))[2]["rayStartParams"] == start


def test_a_rayjob_says_what_its_image_needs(request_there):
    assert "needs Ray" in str(dispatch(request_there(), settings(USUAL, KubernetesJobKind.RAYJOB)).notes)


MODELS = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def templates(value):
    """Every template of pods in a part of a document."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value["template"]] if isinstance(value, dict) and "template" in value else []
    return own or [found for child in children for found in templates(child)]


@pytest.mark.parametrize("kind", list(KubernetesJobKind))
@pytest.mark.parametrize("site", [USUAL, FULL], ids=["usual", "full"])
def test_the_projects_own_classes_read_the_documents_whole(site, kind, request_there):
    """Kubernetes, JobSet and Kubeflow Trainer, generated from their APIs; of a PyTorchJob and a RayJob the pods."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in documents(request_there(), settings(site, kind)):
        if document["kind"] not in MODELS:
            pods = list(templates(document["spec"]))
            read = [models.IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_dict() for pod in pods]
            assert read == pods
        else:
            assert getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict() == document


def test_secrets_scheduler_and_annotations_reach_the_pods(request_there):
    found = documents(request_there(), settings(FULL, KubernetesJobKind.JOBSET))[1]
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rail-0,rail-1"}
    assert (pod["spec"]["schedulerName"], pod["spec"]["imagePullSecrets"]) == ("volcano", [{"name": "registry"}])
    assert pod["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "hub-token"}}]


def container_of(request, site):
    """The container of the first pod."""
    _, job = documents(request, settings(site, KubernetesJobKind.PYTORCHJOB))
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return spec["containers"][0], spec


def test_kubernetes_expands_nothing_in_arguments_and_values(request_there):
    """It reads $(NAME) in commands and variables, and $$ as one $."""
    said = EnvironmentVariable(name="SECRET", value="a$$b$(HOME)", reason="as given", source="--env")
    request = request_there(argv=("python", "$(HOME)"), environment=(said,))
    container, spec = container_of(request, USUAL)
    assert container["env"][0]["value"] == "a$$$$b$$(HOME)"
    assert container["command"][-1] == "$$(HOME)"
    assert '"$$HOSTNAME"' in spec["initContainers"][0]["command"][-1]


def test_volumes_have_names_of_their_own(request_there):
    """A claim may be mounted twice, and have a name that no volume can have."""
    claims = (VolumeClaim(name="ann.data", mount="/results"), VolumeClaim(name="shared-memory", mount="/a"),
              VolumeClaim(name="ann.data", mount="/b"))  # fmt: skip
    site = USUAL.model_copy(update={"claims": claims})
    container, spec = container_of(request_there(), site)
    names = [volume["name"] for volume in spec["volumes"]]
    assert len(names) == len(set(names)) == 4
    assert {m["mountPath"]: m["name"] for m in container["volumeMounts"]} == {
        "/dev/shm": "shared-memory", "/results": "claim-0", "/a": "claim-1", "/b": "claim-0",
    }  # fmt: skip
    for document in documents(request_there(), settings(site, KubernetesJobKind.JOBSET)):
        jsonschema.validate(document, SCHEMA)


def test_memory_is_locked_only_for_rdma(request_there):
    """Namespaces under the baseline of Pod Security refuse the capability."""
    assert "IPC_LOCK" in str(container_of(request_there(), USUAL))
    assert "IPC_LOCK" not in str(container_of(request_there(), USUAL.model_copy(update={"rdma_resource": None})))


def test_the_schema_is_closed(request_there):
    _, job = documents(request_there(), settings(USUAL, KubernetesJobKind.JOBSET))
    job["spec"]["restarts"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def test_one_node_is_a_single_master(request_there):
    _, job = documents(request_there(num_nodes=1), settings(USUAL, KubernetesJobKind.PYTORCHJOB))
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master"}


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_the_operator_counts_restarts_of_all_pods(num_nodes, max_restarts, request_there):
    _, job = documents(
        request_there(num_nodes=num_nodes, max_restarts=max_restarts), settings(USUAL, KubernetesJobKind.PYTORCHJOB)
    )
    limit = job["spec"]["runPolicy"]["backoffLimit"]
    assert num_nodes * max_restarts < limit  # it fails when the sum is the limit: these are allowed
    assert num_nodes * (max_restarts + 1) >= limit  # and not one more of every pod


@pytest.mark.parametrize(("vendor", "resource"), [("NVIDIA", "nvidia.com/gpu"), ("AMD", "amd.com/gpu"), (None, None)])
def test_devices_are_asked_for_by_vendor(vendor, resource, request_there):
    _, job = documents(request_there(vendor=vendor), settings(USUAL, KubernetesJobKind.PYTORCHJOB))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    limits = {"rdma/hca": 1} | ({resource: 8} if resource else {})
    assert container["resources"] == {"limits": limits}


def test_hosts_are_excluded(request_there):
    _, job = documents(request_there(), settings(USUAL, KubernetesJobKind.JOBSET))
    assert "'operator': 'NotIn', 'values': ['node07', 'node11']" in str(job)
    _, job = documents(request_there(exclude=()), settings(USUAL, KubernetesJobKind.JOBSET))
    assert "affinity" not in str(job)


@pytest.mark.parametrize(
    ("change", "fields", "text"),
    [
        ({"image": None}, {}, "needs an image"),
        ({"claims": ()}, {}, "results would be lost"),
        ({}, {"folder": Path("/elsewhere/first")}, "results would be lost"),
        ({}, {"checkpoints": "/scratch/saved"}, "checkpoints would be lost"),
    ],
)
def test_what_would_be_lost_is_refused(change, fields, text, request_there):
    request = replace(request_there(), **fields)
    with pytest.raises(InputError, match=text):
        dispatch(request, settings(USUAL.model_copy(update=change), KubernetesJobKind.JOBSET))


@pytest.mark.parametrize("name", ["8b", "Llama 3.1", "x" * 90, "_", "a/b"])
def test_any_name_becomes_one_that_kubernetes_takes(name):
    jsonschema.validate(resource_name(name), {"$ref": "#/$defs/name", "$defs": SCHEMA["$defs"]})


REFUSED = (
    ("annotations: {'bad key!': x}", "annotations"), ("annotations: {'%s': x}" % ("a" * 64), "annotations"),
    ("annotations: {a/b: 1}", "annotations"), ("secrets: [Bad_Name]", "secrets"), ("secrets: ['']", "secrets"),
    ("pull_secrets: [a b]", "pull_secrets"), ("scheduler: ''", "scheduler"), ("scheduler: vol cano", "scheduler"),
    ("namespace: Bad_NS", "namespace"), ("queue: a b", "queue"), ("priority_class: A", "priority_class"),
    ("service_account: x/y", "service_account"), ("node_selector: {a b: x}", "node_selector"),
    ("node_selector: {a: x y}", "node_selector"), ("tolerations: [{keyy: a}]", "did you mean 'key'"),
    ("tolerations: [{key: a, operator: Maybe}]", "operator"), ("shared_memory: 64 gigs", "shared_memory"),
    ("cpu: many", "cpu"), ("memory: 1.5TB", "memory"), ("rdma_resource: rdma hca", "rdma_resource"),
    ("device_resource: x y", "device_resource"), ("image: a b", "image"), ("workdir: rel", "workdir"),
    ("claims: [{name: Sh ared, mount: /r}]", "name"), ("claims: [{name: a, mount: r}]", "mount"),
    ("claims: [{name: a, mount: /r}, {name: b, mount: /r}]", "two claims are mounted at /r"),
)  # fmt: skip


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_the_api_server_would_refuse_is_refused_here(line, said, tmp_path):
    (tmp_path / "site.yaml").write_text(f"kubernetes:\n  {line}\n")
    with pytest.raises(RunFileError) as caught:
        read_site(tmp_path / "site.yaml")
    assert said in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_one_claim_may_have_two_mounts_and_an_annotation_any_text(tmp_path):
    lines = ("claims: [{name: a, mount: /r}, {name: a, mount: /d}]", 'annotations: {a/b: "x\\ny: {z}"}')
    (tmp_path / "site.yaml").write_text("kubernetes:\n  " + "\n  ".join(lines) + "\n")
    assert read_site(tmp_path / "site.yaml").kubernetes.annotations == {"a/b": "x\ny: {z}"}


def test_a_value_of_the_command_line_is_held_to_the_same_rules():
    with pytest.raises(InputError, match="--namespace is no name"):
        with_options(Site(), slurm={}, kubernetes={"namespace": "Bad_NS"})
    site = Site(kubernetes=FULL)
    assert with_options(site, slurm={}, kubernetes={}) == site
