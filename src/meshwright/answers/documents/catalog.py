"""The JSON documents of `meshwright catalog`: models, accelerators, clusters, run files and claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.catalog.claim_answers import claim_answer
from meshwright.catalog.clusters import own_cluster
from meshwright.catalog.lookup import CatalogKind, Claim, entry
from meshwright.errors import InfeasibleError, UnknownNameError
from meshwright.json_values import picked
from meshwright.result import Advance, ignore

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate

ABOUT = {"conflicts": "Where sources disagree", "assumptions": "Assumed", "unknown": "Not known"}
"""Parts of an entry that a reader must know before trusting it, and their headings."""


def listing_document(kind: str) -> dict[str, Any]:
    """All entries of `kind`: models, accelerators or clusters."""
    key, entries, names, values = _LISTED[kind]
    rows = [{"name": name, **values(name), "title": entry(entries, name).title} for name in names()]
    return {key: rows} | ({"naming_rule": catalog.NAMING_RULE} if kind == "clusters" else {})


def details_document(kind: str, name: str) -> dict[str, Any]:
    """All values of one entry with their sources. Raises UnknownNameError."""
    if kind == "clusters":
        return _show_cluster(name)
    found = entry(_LISTED[kind][1], name)
    computed = {"computed": _parameters(found.name)} if kind == "models" else {}
    return _entry_document(found) | computed


def _model_values(name: str) -> dict[str, Any]:
    m = catalog.model(name)
    experts = m.experts.num_experts if m.experts else 0
    return _parameters(name) | picked(m, "num_layers", "hidden") | {
        "num_experts": experts, "attention": m.attention.kind.value,
    }  # fmt: skip


def _parameters(name: str) -> dict[str, int]:
    from meshwright.cost.flops import count_parameters
    from meshwright.cost.tables import model_row

    parameters = count_parameters(model_row(catalog.model(name)))
    return {"total_parameters": int(parameters.total), "active_parameters": int(parameters.active)}


def _accelerator_values(name: str) -> dict[str, Any]:
    a = catalog.accelerator(name)
    peaks = {f"{f}_flops_per_s": a.peak_flops_per_s.get(f) for f in ("bf16", "fp8", "fp4")}
    return peaks | picked(a, "memory_bytes", "memory_bytes_per_s", "scale_up_bytes_per_s", "scale_out_bytes_per_s")


def _fabric_values(name: str) -> dict[str, Any]:
    shown = ("scale_up_domain", "scale_up_bytes_per_s", "scale_out_bytes_per_s", "oversubscription")
    return picked(catalog.fabric(name), *shown)


_LISTED: dict[str, tuple[str, CatalogKind, Callable[[], Iterable[str]], Callable[[str], dict[str, Any]]]] = {
    "models": ("models", CatalogKind.MODEL, catalog.model_names, _model_values),
    "accelerators": ("accelerators", CatalogKind.ACCELERATOR, catalog.accelerator_names, _accelerator_values),
    "clusters": ("fabrics", CatalogKind.FABRIC, catalog.fabric_names, _fabric_values),
}
"""Of each kind: the key of its rows, its entries, their names, and what a row has of one."""


def own_accelerator_document(path: str) -> dict[str, Any]:
    """All values of the accelerator that a user's file describes, as plans take them, and their assumptions.

    Raises RunFileError with all that is wrong in the file.
    """
    from meshwright.runfile.accelerator_file import assumptions_of, read_accelerator

    found = read_accelerator(path)
    num_devices = found.values.get("devices_per_node", 1)
    cluster = own_cluster(found, devices_per_node=num_devices, num_nodes=1)
    used = {key: value for key, value in asdict(cluster.accelerator).items() if key in USED}
    document, assumed = _entry_document(found), assumptions_of(found)
    stated = dict(leaves(found.values))
    sources = {path: document["source_of"].get(path) if path in stated else "assumed" for path, _ in leaves(used)}
    return document | {
        "source_of": document["source_of"] | sources,
        "file": path, "cluster": cluster.name, "values": document["values"] | used, "assumed": assumed,
    }  # fmt: skip


USED = (
    "peak_flops_per_s", "memory_bytes", "memory_bytes_per_s", "host_bytes_per_s", "scale_up_domain",
    "scale_up_bytes_per_s", "scale_up_peer_bytes_per_s", "scale_out_bytes_per_s", "num_compute_units",
)  # fmt: skip
"""Fields of an accelerator that every estimate takes, stated or assumed."""


def _show_cluster(name: str) -> dict[str, Any]:
    """A cluster by its name, or a fabric by its own."""
    try:
        return _entry_document(entry(CatalogKind.FABRIC, name))
    except UnknownNameError:
        pass  # not a fabric: it must read as a cluster
    found = catalog.cluster(name)
    document = _entry_document(entry(CatalogKind.FABRIC, found.fabric.name))
    placed = {field: getattr(found.fabric, field) for field in document["values"] if hasattr(found.fabric, field)}
    computed = {
        "accelerator": found.accelerator.name, "fabric": found.fabric.name,
        **picked(found, "devices_per_node", "num_nodes", "num_devices"),
    }  # fmt: skip
    title = f"{found.num_devices:,} {found.accelerator.name} on: {document['title']}"
    return document | {"name": found.name, "title": title, "computed": computed, "values": placed}


def _entry_document(found: Any) -> dict[str, Any]:
    return {
        **picked(found, "name", "title", "values", "published", "sources", *ABOUT),
        "aliases": list(found.aliases),
        "source_of": {path: found.source_of(path) for path, _ in leaves(found.values)},
    }


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


DEVICES = ("mi300x", "mi325x", "mi355x", "h100", "h200", "b200")
MOST_DOUBLINGS = 5


def on_device(name: str, device: str) -> RunEstimate:
    """The planner's best plan of the run file `name` on nodes of `device`, with its estimate.

    The number of nodes is the file's, doubled until a plan fits. Raises InfeasibleError when none
    does.
    """
    cluster = runfile.load(name).cluster
    assert cluster is not None  # files that ship name one
    num_nodes = cluster.num_nodes
    for _ in range(MOST_DOUBLINGS):
        try:
            return _estimate(name, device, num_nodes)
        except InfeasibleError:
            num_nodes *= 2
    return _estimate(name, device, num_nodes)


def _estimate(name: str, device: str, num_nodes: int) -> RunEstimate:
    from meshwright.answers.run_estimate import estimate_run

    cluster = f"{device}-{catalog.usual_devices_per_node(device)}x{num_nodes}"
    return estimate_run(runfile.load(name, overrides=[f"cluster={cluster}"]))


def run_files_document(name: str | None, *, predict: bool = False, advance: Advance = ignore) -> dict[str, Any]:
    """All run files, or the one called `name` with its text; with `predict`, an estimate on each published device.

    `advance(1)` is called after each predicted run file.
    """
    names, text = catalog.run_file_names() if name is None else (name,), catalog.run_file_text
    rows = [_row(one, text(one)) | ({} if name is None else {"text": text(one)}) for one in names]
    if predict:
        for row in rows:
            row["predictions"] = [_prediction(on_device(row["name"], device)) for device in DEVICES]
            advance(1)
    return {"runs": rows} if name is None else rows[0]


def _row(name: str, text: str) -> dict[str, Any]:
    run = runfile.loads(text, file=f"{name}.yaml")
    return {
        "name": name,
        "model": run.model.name,
        "task": run.task,
        "sequence_length": run.sequence_length,
        "global_sequences": run.global_batch,
        "precision": run.precision.name,
        "cluster": run.cluster_name,
        "engine": run.engine,
    }


def _prediction(done: RunEstimate) -> dict[str, Any]:
    step = done.estimate.step
    return {
        "cluster": done.run.cluster_name,
        "plan": done.plan.describe(),
        "tokens_per_s_per_device": step.tokens_per_s_per_device,
        "reserved_bytes": step.memory.reserved_bytes,
        "memory_bytes": step.memory.capacity_bytes,
    }


def claims_document(*, predict: bool = False, advance: Advance = ignore) -> dict[str, Any]:
    """All claims. `advance(1)` is called after each."""
    rows = []
    for claim in catalog.all_claims():
        rows.append(claim_document(claim, predict=predict))
        advance(1)
    return {"claims": rows}


def claim_document(claim: Claim, *, predict: bool = False) -> dict[str, Any]:
    """A claim, its answer, and with `predict` its computed values (None: nothing yet)."""
    answer = picked(claim_answer(claim), "kind", "commands", "assumed")
    return {**asdict(claim), "answer": answer} | ({"prediction": _prediction_document(claim)} if predict else {})


def _prediction_document(claim: Claim) -> dict[str, Any] | None:
    from meshwright.inference.claims import predict_serving_claim
    from meshwright.planner.claims import predict_claim

    try:
        found = predict_claim(claim) or predict_serving_claim(claim)
    except InfeasibleError as error:
        return {"why_not": error.message}
    if found is None:
        return None
    return {"value": found.value, "over_printed": found.ratio, "is_inside": found.is_inside, "plans": found.plans}
