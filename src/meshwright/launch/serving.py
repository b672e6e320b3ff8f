"""The servers of a serving plan: a script for its nodes, a Kubernetes manifest and a page.

`data/servers.toml` has the command line of each engine. A replica inside a node is a process with its own devices and
port; one that spans nodes is a process on each of them. Kubernetes gets a Deployment of replicas that fit a node.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.inference.arrivals import arrivals_named, places
from meshwright.inference.search import LayoutPoint, ServingQuestion
from meshwright.launch.kubernetes import RESOURCES, resource_name, yaml_text

SCRIPT, MANIFEST, PAGE, OPTIONS = "start.sh", "kubernetes.yaml", "README.md", "options.yaml"
PORT, ROUTER_PORT, BOOTSTRAP = 8000, 9000, 10000
WIDE = ("bf16", "fp16")
HERE = "/plan"  # of a pod, for the engine's file
_DATA = Path(__file__).parent / "data"
VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES"}
"""Variables that name the devices of a process."""

HEAD = """
  HEAD=$(echo "${HOSTS:?the addresses of all nodes, in the order of their numbers}" | cut -d ' ' -f "$(($5 + 1))")"""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Files by name, and what they leave open."""

    files: Mapping[str, str]
    notes: tuple[str, ...]


def deployment(
    question: ServingQuestion, point: LayoutPoint, *, repository: str | None, stored: str, summary: str
) -> Deployment:
    """Return the files that start `point`.

    repository   name of the model for the engine; None: it has to be given as MODEL
    stored       format of its checkpoint, as `formats.toml` names it
    summary      the plan in one line

    Raises InputError for an engine, a degree or a format that no command line has.
    """
    row, vendor, weights = _row(question.engine.name), question.cluster.accelerator.vendor, question.weights.name
    values = _values(question, point)
    read_into = row["quantise"].get(weights) if stored in WIDE else None
    options = [_options(row, question, point, values), *([read_into] if read_into and weights != stored else [])]
    command, notes = " ".join([row["command"], *options]).strip(), []
    if weights != stored and read_into is None:
        repository = None
        notes.append(f"MODEL has to be a checkpoint in {weights}: no option of {row['title']} makes it of {stored}")
    if values["cache"] == "auto" and weights not in WIDE:
        notes.append(
            f"the cache has 16 bits unless the checkpoint names a format of its own: {row['title']} takes that"
        )
    processes = list(_processes(question, point, values["nodes"]))
    default = f":-{shlex.quote(repository)}" if repository else f":?a checkpoint in {weights}"
    texts = {
        SCRIPT: (_DATA / "servers.sh").read_text(encoding="utf-8").format(
            title=" ".join(f"{summary}; {row['title']}".split()), model=default, command=command,
            head=HEAD if values["nodes"] > 1 else "", starts="\n".join(p.line(row) for p in processes),
            devices=f"{VISIBLE[vendor]}=$DEVICES " if vendor in VISIBLE else "",
        )
    }  # fmt: skip
    if "options" in row:
        texts[OPTIONS] = row["options"].lstrip().format(**values)
    if values["nodes"] > 1 or point.prefill_replicas:
        notes.append("no Kubernetes manifest is written for replicas that span nodes, or that only prefill")
    elif vendor in row["images"]:
        pod = _pod(row, question, point, f": ${{MODEL:?a checkpoint in {weights}}}; exec {command}", repository or "")
        texts[MANIFEST] = "---\n".join(map(yaml_text, _manifest(question, point, pod, texts.get(OPTIONS))))
    texts[PAGE] = _page(question, point, row, summary, processes, notes, has_manifest=MANIFEST in texts)
    return Deployment(files=texts, notes=tuple(notes))


def _row(engine: str) -> dict[str, Any]:
    table = toml_table(_DATA / "servers.toml")
    if engine not in table:
        raise InputError("servers of this engine are not written", got=engine, allowed=", ".join(table))
    return table[engine]


def _values(question: ServingQuestion, point: LayoutPoint) -> dict[str, Any]:
    layout, context = point.layout, question.load.input_tokens + question.load.output_tokens
    groups = layout.attention_data
    sequences = math.ceil(point.concurrency / (layout.replicas - point.prefill_replicas) / groups)
    if question.requests_per_s is not None:  # as many in flight are a mean, and those that come by chance have a place
        sequences = max(
            int(places(question.server(layout, point.prefill_replicas), question.load).sequences / groups), 1
        )
    return {
        "tensor": layout.tensor, "group": layout.group_size, "pipeline": layout.pipeline, "attention_data": groups,
        "expert": layout.expert, "has_groups": str(groups > 1).lower(), "sequences": sequences,
        "all_sequences": sequences * groups, "batch_tokens": question.engine.batch_tokens,
        "all_batch_tokens": question.engine.batch_tokens * groups, "context": context,
        "all_context": sequences * context, "memory_ratio": question.reserve.memory_ratio,
        "cache": _row(question.engine.name)["cache"].get(question.cache.name),
        "nodes": -(-layout.replica_devices // question.cluster.devices_per_node),
    }  # fmt: skip


def _options(row: Mapping[str, Any], question: ServingQuestion, point: LayoutPoint, values: Mapping[str, Any]) -> str:
    """Options of every server. Raises InputError for what the engine does not have."""
    layout, title = point.layout, row["title"]
    degrees = {"tensor": layout.group_size if "{group}" in row.get("tensor", "") else layout.tensor}
    degrees |= {name: getattr(layout, name) for name in ("pipeline", "attention_data", "expert")}
    degrees["nodes"] = values["nodes"]
    found = [row["always"]]
    for name, degree in degrees.items():
        if degree > 1 and (
            name not in row or (name == "attention_data" and row.get("single_group") and layout.tensor > 1)
        ):
            raise InputError(f"no option of {title} makes this layout", got=layout.describe(), hint="another --engine")
        found += [row[name]] if degree > 1 else []
    if values["nodes"] > 1 and layout.attention_data > 1 and not row.get("groups_over_nodes"):
        raise InputError(
            "attention groups of one server on several nodes are not written", got=layout.describe(),
            hint="--engine sglang",
        )  # fmt: skip
    if point.prefill_replicas and "prefill" not in row:
        raise InputError(f"replicas that only prefill are not written for {title}", hint="--engine sglang")
    if values["cache"] is None:
        raise InputError(
            f"no option of {title} has this cache", got=question.cache.name, allowed=", ".join(row["cache"])
        )
    found += [] if "options" in row else [values["cache"]]
    return " ".join(found).format(**values).rstrip()


@dataclass(frozen=True, kw_only=True)
class _Process:
    """A server, or its part on one node."""

    node: int
    devices: tuple[int, ...]
    port: int
    rank: int  # of the node among those of the replica
    head: int  # the first of these nodes
    role: str  # prefill, decode or "": both
    bootstrap: int  # port at which a server that prefills hands its cache over

    def line(self, row: Mapping[str, Any]) -> str:
        """The line of the script that starts it."""
        more = row[self.role].format(bootstrap=self.bootstrap) if self.role else ""
        more = more or (row.get("worker", "") if self.rank else "")
        devices = ",".join(map(str, self.devices))
        return f"serve {self.node} {devices} {self.port} {self.rank} {self.head} {more}".rstrip()


def _processes(question: ServingQuestion, point: LayoutPoint, nodes: int) -> Iterator[_Process]:
    """All processes of a layout whose replicas span `nodes` nodes."""
    layout, each = point.layout, question.cluster.devices_per_node
    shared = max(1, each // layout.replica_devices)  # replicas of a node
    on_node = layout.replica_devices // nodes
    for replica in range(layout.replicas):
        place = replica % shared
        head = replica // shared * nodes
        role = "" if not point.prefill_replicas else "prefill" if replica < point.prefill_replicas else "decode"
        for rank in range(nodes):
            yield _Process(
                node=head + rank, devices=tuple(range(place * on_node, (place + 1) * on_node)), port=PORT + place,
                rank=rank, head=head, role=role, bootstrap=BOOTSTRAP + place,
            )  # fmt: skip


def _pod(
    row: Mapping[str, Any], question: ServingQuestion, point: LayoutPoint, start: str, model: str
) -> dict[str, Any]:
    """The pod of one replica."""
    accelerator = question.cluster.accelerator
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    container = {
        "name": "server", "image": row["images"][accelerator.vendor],
        "command": ["sh", "-c", start], "ports": [{"containerPort": PORT}],
        "env": [
            {"name": name, "value": value} for name, value in {"MODEL": model, "PORT": str(PORT), "HERE": HERE}.items()
        ],
        "resources": {"limits": {RESOURCES[accelerator.vendor]: point.layout.replica_devices}},
        "startupProbe": probe | {"periodSeconds": 10, "failureThreshold": 360}, "readinessProbe": probe,
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    return {"containers": [container], "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]}


def _manifest(
    question: ServingQuestion, point: LayoutPoint, pod: dict[str, Any], options: str | None
) -> Iterator[dict[str, Any]]:
    """A Deployment with a pod for each replica, the service before them, and the engine's file."""
    name = resource_name(f"{question.model.name}-{question.engine.name}")
    labels = {"app": name}
    if options is not None:
        pod["containers"][0]["volumeMounts"].append({"name": "options", "mountPath": HERE})
        pod["volumes"].append({"name": "options", "configMap": {"name": name}})
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {OPTIONS: options}}
    yield {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": point.layout.replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }  # fmt: skip
    yield {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": PORT}]},
    }  # fmt: skip


def _page(
    question: ServingQuestion, point: LayoutPoint, row: Mapping[str, Any], summary: str, processes: Sequence[_Process],
    notes: Sequence[str], *, has_manifest: bool,
) -> str:  # fmt: skip
    """Return the page: the start of the servers, the prediction of one, and the command that measures it."""
    load, is_split = question.load, bool(point.prefill_replicas)
    parts, port = (1, ROUTER_PORT) if is_split else (point.layout.replicas, PORT)
    lines = [
        f"# {question.model.name} on {question.cluster.name}", f"{summary}.",
        f"`sh start.sh NODE` starts the servers of a node, of {row['title']}. They write `server-NODE-PORT.log`, and "
        "SIGTERM ends them. `MODEL=...` before it names another checkpoint.",
    ]  # fmt: skip
    if any(process.rank for process in processes):
        lines.append('A replica spans nodes: `HOSTS="node0 node1 ..."` before it has the addresses of all nodes.')
    if is_split:
        urls = {process: f"--{process.role} http://node{process.node}:{process.port}" for process in processes}
        ends = (f"{url} {p.bootstrap}" if p.role == "prefill" else url for p, url in urls.items())
        lines += ["A router sends each request to a server of each kind:"]
        lines += [f"```bash\n{row['router']} --port {ROUTER_PORT} {' '.join(ends)}\n```"]
    if has_manifest:
        lines.append(
            f"`kubectl apply -f {MANIFEST}` starts the same servers as pods behind one service. Name a release of the "
            "image first."
        )
    lines += [
        f"Predicted of {'all together' if is_split else 'each server'}: {point.output_tokens_per_s / parts:,.0f} "
        f"output tokens/s, ITL {point.itl_s * 1e3:.1f} ms, TTFT {point.ttft_s * 1e3:,.0f} ms. To measure it:",
        f"```bash\nmeshwright bench serve http://NODE:{port} {_measured_load(question, point, parts)} "
        f"--input-tokens {load.input_tokens} --output-tokens {load.output_tokens}\n```",
        *(f"Note: {note}." for note in notes),
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _measured_load(question: ServingQuestion, point: LayoutPoint, parts: int) -> str:
    """Options of the load of one of `parts` servers: requests are dealt to them in turn."""
    if (rate := question.requests_per_s) is None:
        return f"--concurrency {max(1, round(point.concurrency / parts))}"
    shape = (arrivals_named(question.arrivals, rate).shape or 1.0) * parts
    named = "constant" if question.arrivals == "constant" else f"gamma --shape {shape:g}"
    return f"--rate {rate / parts:.6g} --arrivals {named}"
