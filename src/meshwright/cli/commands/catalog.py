"""`meshwright catalog`: models, accelerators, clusters, claims and run files, with sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from meshwright import units
from meshwright.answers.documents import catalog as documents
from meshwright.answers.documents.catalog import ABOUT, leaves
from meshwright.answers.quantities import rate
from meshwright.catalog.lookup import all_claims, claim
from meshwright.cli.output import Align, emit, emit_text, emitted_json, print_line, print_table, progress
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.specs.estimate import Estimate
from meshwright.targets import load
from meshwright.units import gib


@verb("catalog")
@click.argument(
    "kind",
    metavar="KIND",
    type=click.Choice(["models", "accelerators", "clusters", "claims", "runs", "template", "check"]),
)
@click.argument("name", required=False)
@click.option("--predict", is_flag=True, help="claims, runs: also predict them; half a minute for all.")
def command(*, kind: str, name: str | None, predict: bool) -> None:
    """Look up models, accelerators, clusters, claims and run files, with sources.

    \b
    models        shapes and parameter counts
    accelerators  peak rates, memory and links, per device
    clusters      fabrics, and any cluster by its name: ACCELERATOR-DEVICESxNODES
    claims        published performance claims
    runs          run files that ship; every command takes their names in place of a RUN.yaml
    template      `template accelerator`: a file to describe your own accelerator in, with comments
    check         `check FILE.toml`: all errors of such a file, or what plans take from it and what they assume

    Without NAME: a table of all. With NAME: all values of one entry, their sources, and where sources disagree.
    """
    predicted, of_files = {"claims": _claims, "runs": _run_files}, {"template": _template, "check": _check}
    if kind in predicted:
        predicted[kind](name, predict=predict)
        return
    if kind in of_files:
        of_files[kind](name)
        return
    if predict:
        raise InputError("--predict is for claims and runs", got=kind, allowed="claims, runs")
    document = documents.listing_document(kind) if name is None else documents.details_document(kind, name)
    emit(document, _print_listing if name is None else _print_details)


def _template(name: str | None) -> None:
    if name != "accelerator":
        raise InputError("a template of", got=name or "nothing", allowed="accelerator")
    text = load("meshwright.runfile.accelerator_file:TEMPLATE").read_text(encoding="utf-8")
    if not emitted_json({"template": text}):
        emit_text(text)


def _check(path: str | None) -> None:
    if path is None:
        raise InputError("a file is missing", hint="meshwright catalog check my.toml")
    document = documents.own_accelerator_document(path)
    if emitted_json(document):
        return
    _print_details(document)
    print_line()
    print_line("Assumed, because the file does not say it", style="bold")
    for key, text in document["assumed"].items():
        print_line(f"{key}: {text}")


def _claims(name: str | None, *, predict: bool) -> None:
    if name is not None:
        document = documents.claim_document(claim(name), predict=predict)
    else:
        with progress("predicting", total=len(all_claims())) as advance:
            document = documents.claims_document(predict=predict, advance=advance)
    show = (lambda found: print_claims(found["claims"])) if name is None else print_claim
    emit(document, show)


def _run_files(name: str | None, *, predict: bool) -> None:
    with progress("predicting") as advance:
        document = documents.run_files_document(name, predict=predict, advance=advance)
    emit(document, print_run_files)


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
    """Values with the number of their source, the numbered sources, and all caveats."""
    print_line(f"{document['name']}: {document['title']}", style="bold")
    if document.get("aliases"):
        print_line(f"also known as {', '.join(document['aliases'])}")
    sources = list(dict.fromkeys(document.get("source_of", {}).values()))
    rows = [(path, _human(path, v), "computed") for path, v in document.get("computed", {}).items()]
    for path, value in leaves(document["values"]):
        source = document.get("source_of", {}).get(path)
        rows.append((path, _human(path, value), "" if source is None else f"[{sources.index(source) + 1}]"))
    rows += [(f"published {path}", _human(path, v), "") for path, v in document.get("published", {}).items()]
    print_table({"field": "left", "value": "right", "source": "left"}, rows)
    for number, source in enumerate(sources, start=1):
        print_line(f"[{number}] {source}")
    for about, heading in ABOUT.items():
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
"""Ending of a field's name -> printed unit, and the size of that unit in the field's own."""


def _unit(path: str) -> tuple[str, float]:
    if "flops_per_s." in path:  # one number format of `peak_flops_per_s`
        return _PRINTED_UNITS["flops_per_s"]
    return next((unit for ending, unit in _PRINTED_UNITS.items() if path.endswith(ending)), ("", 1.0))


def _heading(key: str) -> str:
    """Name of a field with the unit of its column."""
    unit, _ = _unit(key)
    name = key
    for ending in _PRINTED_UNITS:
        name = name.removesuffix(f"_{ending}") if unit else name
    return f"{name.removeprefix('num_').replace('_', ' ')} {unit}".strip()


def _scaled(path: str, value: Any) -> str:
    """The value in its printed unit, without the unit."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    unit, size = _unit(path)
    return f"{value / size:,.5g}" if unit else f"{value:,}"


def _human(path: str, value: Any) -> str:
    return f"{_scaled(path, value)} {_unit(path)[0]}".strip()


def print_run_files(document: dict[str, Any]) -> None:
    """Print a table of all, or the text of one; then the predictions, if any."""
    rows = document.get("runs", [document])
    if "text" in document:
        emit_text(document["text"])
    elif "predictions" not in rows[0]:
        headings: dict[str, Align] = {
            "run": "left", "task": "left", "batch": "right", "precision": "left", "cluster": "left", "engine": "left",
        }  # fmt: skip
        print_table(headings, (_cells(row) for row in rows))
        print_line("`meshwright catalog runs NAME` prints one; every command takes its name in place of a file.")
    if "predictions" in rows[0]:
        _print_predictions(rows)


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    batch = f"{row['global_sequences']:,} x {row['sequence_length']:,}"
    return row["name"], row["task"].value, batch, row["precision"], row["cluster"], row["engine"]


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    headings: dict[str, Align] = {
        "run": "left", "cluster": "left", "plan": "left", "tokens/s/device\n(80 % interval)": "right",
        "GiB\nof": "right",
    }  # fmt: skip
    cells = []
    for row in rows:
        for i, found in enumerate(row["predictions"]):
            tokens = found["tokens_per_s_per_device"]
            cells.append((
                f"{row['name']} {row['precision']}" if i == 0 else "",
                found["cluster"],
                found["plan"],
                f"{rate(tokens.value)} ({rate(tokens.low)}–{rate(tokens.high)})",
                f"{gib(found['reserved_bytes']):.0f} of {gib(found['memory_bytes']):.0f}",
            ))  # fmt: skip
    print_table(headings, cells)


def print_claims(rows: list[dict[str, Any]]) -> None:
    """Print a table of claims, or of their predictions if the rows have any."""
    if any("prediction" in row for row in rows):
        _print_claim_predictions(rows)
        return
    print_table(
        {
            "claim": "left", "model": "left", "accelerator": "left", "devices": "right", "metric": "left",
            "value": "right", "unit": "left", "here": "left",
        },
        (
            (
                r["claim_id"], r["model"], r["accelerator"], r["num_accelerators"], r["metric"],
                f"{r['value']:g}", r["unit"], r["answer"]["kind"].value,
            )
            for r in rows
        ),
    )  # fmt: skip
    print_line()
    print_line("--predict computes the predicted and reproduced claims; NAME shows the commands")


def _print_claim_predictions(rows: list[dict[str, Any]]) -> None:
    computed = [row for row in rows if row["prediction"] is not None]
    print_table(
        {
            "claim": "left", "model": "left", "accelerator": "left", "metric": "left", "printed": "right",
            "computed": "right", "80 % interval": "right", "off": "right",
        },
        (
            (
                r["claim_id"], r["model"], r["accelerator"], r["metric"], f"{r['value']:g}",
                *_claim_cells(r["prediction"]),
            )
            for r in computed
        ),
    )  # fmt: skip
    for row in computed:
        if "why_not" in row["prediction"]:
            print_line(f"{row['claim_id']}: {row['prediction']['why_not']}")
    rated = [r["prediction"] for r in computed if "value" in r["prediction"]]
    inside = sum(p["is_inside"] for p in rated)
    print_line()
    print_line(f"{inside} of {len(rated)} lie in the interval or round into it; * marks those that do not")
    others = Counter(r["answer"]["kind"].value for r in rows if r["prediction"] is None)
    print_line(f"not computed: {', '.join(f'{count} {kind}' for kind, count in others.items())}")


def _claim_cells(prediction: dict[str, Any]) -> tuple[str, str, str]:
    """Value, interval and relative error."""
    if "why_not" in prediction:
        return ("does not fit", "", "")
    value: Estimate = prediction["value"]
    mark = "" if prediction["is_inside"] else " *"
    exact = value.low == value.high
    interval = "" if exact else f"{_number(value.low)} to {_number(value.high)}"
    return _number(value.value), interval, f"{100 * (prediction['over_printed'] - 1):+z.1f} %{mark}"


def _number(value: float) -> str:
    """Four significant digits, or a whole number above 1000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def print_claim(document: dict[str, Any]) -> None:
    """Print one claim, its prediction, and the commands that reproduce it."""
    print_line(f"{document['claim_id']}: {document['document']}", style="bold")
    hidden = ("claim_id", "document", "answer", "prediction")
    rows = [(k, v) for k, v in document.items() if k not in hidden and v not in ("", None)]
    rows = [(k, f"{v:,g}" if isinstance(v, float) else v) for k, v in rows]
    print_table(("field", "value"), [*rows, *_answer_rows(document)])
    print_line()
    for command in document["answer"]["commands"]:
        print_line(command)


def _answer_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    answer = document["answer"]
    yield "here", answer["kind"].value
    if answer["assumed"]:
        yield "assumed", answer["assumed"]
    prediction = document.get("prediction")
    if not prediction:
        return
    value, interval, off = _claim_cells(prediction)
    text = f"{value} ({interval}), {off}" if interval else f"{value}, {off}"
    yield "computed", prediction.get("why_not", text)
    for plan in prediction.get("plans", ()):
        yield "with plan", plan
