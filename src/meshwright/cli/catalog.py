"""`meshwright catalog`: look up what Meshwright knows, every value with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from meshwright import units
from meshwright.cli.options import json_option, verb
from meshwright.cli.output import emit_json, print_line, print_table
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.cli.output import Align

_NOTES = {
    "conflicts": "Where sources disagree",
    "assumptions": "Assumed",
    "unknown": "Not known",
}


@verb(
    "catalog",
    examples=[
        "meshwright catalog models",
        "meshwright catalog models moe-2t",
        "meshwright catalog accelerators mi355x --json",
        "meshwright catalog clusters gb200-4x18",
        "meshwright catalog claims scale_06 --predict",
        "meshwright catalog runs llama3-8b",
    ],
)
@click.argument("kind", type=click.Choice(["models", "accelerators", "clusters", "claims", "runs"]))
@click.argument("name", required=False)
@click.option(
    "--predict", is_flag=True, help="Of claims and runs: compute what can be (half a minute for all)."
)
@json_option
def command(kind: str, name: str | None, predict: bool, as_json: bool) -> None:
    """Look up models, accelerators, clusters (and their fabrics), published claims, and run files that ship.

    Without NAME: a table of all. With NAME: all values of one, their sources, and where sources disagree.
    """
    if kind == "claims":
        _claims(name, predict=predict, as_json=as_json)
        return
    if kind == "runs":
        _run_files(name, predict=predict, as_json=as_json)
        return
    if predict:
        raise InputError("--predict is about claims and runs", got=kind, allowed="claims, runs")
    listing, details = _VIEWS[kind]
    document = listing() if name is None else details(name)
    if as_json:
        emit_json(document)
    elif name is None:
        _print_listing(document)
    else:
        _print_details(document)


def _claims(name: str | None, *, predict: bool, as_json: bool) -> None:
    from meshwright.catalog import claim
    from meshwright.cli.claim_views import claim_document, list_claims, print_claim, print_claims

    document = list_claims(predict=predict) if name is None else claim_document(claim(name), predict=predict)
    if as_json:
        emit_json(document)
    elif name is None:
        print_claims(document["claims"])
    else:
        print_claim(document)


def _run_files(name: str | None, *, predict: bool, as_json: bool) -> None:
    from meshwright.cli.run_file_views import print_run_files, run_files_document

    document = run_files_document(name, predict=predict)
    if as_json:
        emit_json(document)
    else:
        print_run_files(document)


def _list_models() -> dict[str, Any]:
    from meshwright.catalog import Kind, entry, model, model_names

    rows = []
    for name in model_names():
        m = model(name)
        rows.append(
            {
                "name": name,
                **_parameters(name),
                "num_layers": m.num_layers,
                "hidden": m.hidden,
                "num_experts": m.experts.num_experts if m.experts else 0,
                "attention": m.attention.kind.value,
                "title": entry(Kind.MODEL, name).title,
            }
        )
    return {"models": rows}


def _show_model(name: str) -> dict[str, Any]:
    from meshwright.catalog import Kind, entry

    found = entry(Kind.MODEL, name)
    return _entry_document(found) | {"computed": _parameters(found.name)}


def _parameters(name: str) -> dict[str, int]:
    from meshwright.catalog import model
    from meshwright.cost.flops import count_parameters
    from meshwright.cost.tables import model_row

    parameters = count_parameters(model_row(model(name)))
    return {"total_parameters": int(parameters.total), "active_parameters": int(parameters.active)}


def _list_accelerators() -> dict[str, Any]:
    from meshwright.catalog import Kind, accelerator, accelerator_names, entry

    rows = []
    for name in accelerator_names():
        a = accelerator(name)
        rows.append(
            {
                "name": name,
                **{f"{f}_flops_per_s": a.peak_flops_per_s.get(f) for f in ("bf16", "fp8", "fp4")},
                "memory_bytes": a.memory_bytes,
                "memory_bytes_per_s": a.memory_bytes_per_s,
                "scale_up_bytes_per_s": a.scale_up_bytes_per_s,
                "scale_out_bytes_per_s": a.scale_out_bytes_per_s,
                "title": entry(Kind.ACCELERATOR, name).title,
            }
        )
    return {"accelerators": rows}


def _show_accelerator(name: str) -> dict[str, Any]:
    from meshwright.catalog import Kind, entry

    return _entry_document(entry(Kind.ACCELERATOR, name))


def _list_clusters() -> dict[str, Any]:
    from meshwright.catalog import NAMING_RULE, Kind, entry, fabric, fabric_names

    rows = []
    for name in fabric_names():
        f = fabric(name)
        rows.append(
            {
                "name": name,
                "scale_up_domain": f.scale_up_domain,
                "scale_up_bytes_per_s": f.scale_up_bytes_per_s,
                "scale_out_bytes_per_s": f.scale_out_bytes_per_s,
                "oversubscription": f.oversubscription,
                "title": entry(Kind.FABRIC, name).title,
            }
        )
    return {"fabrics": rows, "naming_rule": NAMING_RULE}


def _show_cluster(name: str) -> dict[str, Any]:
    """A cluster by its name, or a fabric by its own."""
    from meshwright.catalog import Kind, cluster, entry
    from meshwright.errors import UnknownNameError

    try:
        return _entry_document(entry(Kind.FABRIC, name))
    except UnknownNameError:
        pass  # not a fabric: it must read as a cluster
    found = cluster(name)
    document = _entry_document(entry(Kind.FABRIC, found.fabric.name))
    placed = {
        field: getattr(found.fabric, field) for field in document["values"] if hasattr(found.fabric, field)
    }
    computed = {
        "accelerator": found.accelerator.name,
        "fabric": found.fabric.name,
        "devices_per_node": found.devices_per_node,
        "num_nodes": found.num_nodes,
        "num_devices": found.num_devices,
    }
    title = f"{found.num_devices:,} {found.accelerator.name} on: {document['title']}"
    return document | {"name": found.name, "title": title, "computed": computed, "values": placed}


_VIEWS = {
    "models": (_list_models, _show_model),
    "accelerators": (_list_accelerators, _show_accelerator),
    "clusters": (_list_clusters, _show_cluster),
}


def _entry_document(found: Any) -> dict[str, Any]:
    return {
        "name": found.name,
        "title": found.title,
        "aliases": list(found.aliases),
        "values": found.values,
        "published": found.published,
        "sources": found.sources,
        "source_of": {path: found.source_of(path) for path, _ in _leaves(found.values)},
        **{about: getattr(found, about) for about in _NOTES},
    }


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _print_listing(document: dict[str, Any]) -> None:
    rows = next(rows for rows in document.values() if isinstance(rows, list))
    columns = [key for key in rows[0] if key != "title" or "fabrics" in document]
    aligned: dict[str, Align] = {
        _heading(key): "left" if key in ("name", "title", "attention") else "right" for key in columns
    }
    print_table(aligned, ([_scaled(key, row[key]) for key in columns] for row in rows))
    if "naming_rule" in document:
        print_line(f"A cluster is named {document['naming_rule']}.")


def _print_details(document: dict[str, Any]) -> None:
    """Values with the number of their source, the numbered sources, and everything to be careful about."""
    print_line(f"{document['name']}: {document['title']}", style="bold")
    if document.get("aliases"):
        print_line(f"also known as {', '.join(document['aliases'])}")
    sources = list(dict.fromkeys(document.get("source_of", {}).values()))
    rows = [(path, _human(path, v), "computed") for path, v in document.get("computed", {}).items()]
    for path, value in _leaves(document["values"]):
        source = document.get("source_of", {}).get(path)
        rows.append((path, _human(path, value), "" if source is None else f"[{sources.index(source) + 1}]"))
    rows += [(f"published {path}", _human(path, v), "") for path, v in document.get("published", {}).items()]
    print_table({"field": "left", "value": "right", "source": "left"}, rows)
    for number, source in enumerate(sources, start=1):
        print_line(f"[{number}] {source}")
    for about, heading in _NOTES.items():
        if document.get(about):
            print_line()
            print_line(heading, style="bold")
            for path, text in document[about].items():
                print_line(f"{path}: {text}")


_PRINTED_UNITS: dict[str, tuple[str, float]] = {
    "flops_per_s": ("TFLOP/s", units.TERA),
    "bytes_per_s": ("GB/s", units.GB),
    "bytes": ("GiB", units.GIB),
    "latency_s": ("µs", 1e-6),
    "parameters": ("B", 1e9),
    "tdp_w": ("W", 1.0),
}
"""Ending of a field's name -> unit it is printed in, and that unit in the field's own."""


def _unit(path: str) -> tuple[str, float]:
    if "flops_per_s." in path:  # one number format of `peak_flops_per_s`
        return _PRINTED_UNITS["flops_per_s"]
    return next((unit for ending, unit in _PRINTED_UNITS.items() if path.endswith(ending)), ("", 1.0))


def _heading(key: str) -> str:
    """A field's name with the unit of its column."""
    unit, _ = _unit(key)
    words = key
    for ending in _PRINTED_UNITS:
        words = words.removesuffix(f"_{ending}") if unit else words
    return f"{words.removeprefix('num_').replace('_', ' ')} {unit}".strip()


def _scaled(path: str, value: Any) -> str:
    """A value in the unit it is printed in, without the unit."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    unit, size = _unit(path)
    return f"{value / size:,.5g}" if unit else f"{value:,}"


def _human(path: str, value: Any) -> str:
    return f"{_scaled(path, value)} {_unit(path)[0]}".strip()
