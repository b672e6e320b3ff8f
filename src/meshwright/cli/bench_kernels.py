"""`meshwright bench kernels`: all routes of the training kernels on the shapes of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.cli.output import Align, emit_json, load_with_torch, note, print_line, print_table
from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels.operations import OPERATIONS

FORMATS = ("bf16", "fp32")


def run(
    *,
    ops: str | None,
    models: str,
    tokens: int | None,
    formats: str | None,
    compiles: bool | None,
    budget_s: float,
    folder: Path,
    as_json: bool,
) -> None:
    """Check what is asked for, measure, write the folder and print a table."""
    chosen = None if ops is None else _names(ops, "--ops", OPERATIONS)
    named = [catalog.model(name) for name in _names(models, "--models", None)]
    wanted = None if formats is None else _names(formats, "--formats", FORMATS)
    measure = load_with_torch("meshwright.cli.bench_kernels_torch:measure", what="measuring kernels")
    found: dict[str, Any] = measure(
        chosen, named, tokens=tokens, formats=wanted, compiles=compiles, budget_s=budget_s, folder=folder
    )
    if as_json:
        emit_json({name: value for name, value in found.items() if name != "table"})
        return
    print_line(found["device"]["name"], style="bold")
    columns: dict[str, Align] = {"call": "left", "route": "left"}
    for name in ("forward ms", "backward ms", "of roofline", "peak memory", "error"):
        columns[name] = "right"
    columns["remark"] = "left"
    print_table(columns, found["table"])
    print_line(f"All rows, the tuned table and the records are in {found['folder']}.")
    note(*found["notes"])


def _names(text: str, option: str, known: Any) -> Sequence[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(f"{option} names none", allowed=None if known is None else ", ".join(known))
    for name in names:
        if known is not None and name not in known:
            raise UnknownNameError(f"{option}: name", name, known=known)
    return names
