"""`meshwright estimate --memory`: the memory of training one model, as a table, JSON or CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.answers.model_memory import MemoryRow, ModelMemory
from meshwright.api.estimate import estimate_memory
from meshwright.api.question import ask
from meshwright.cli.output import Align, emit_json, note, print_line, print_table
from meshwright.units import gib


def print_model_memory(asked: Mapping[str, Any], *, csv_path: Path | None, as_json: bool) -> None:
    """Ask `estimate_memory`, and write the formats asked for."""
    found = ask(estimate_memory, asked)
    for caution in found.notes:
        note(caution)
    if csv_path is not None:
        found.write_csv(csv_path)
        note(f"wrote {csv_path}")
    if as_json:
        emit_json(found.to_dict())
    else:
        _print(found)


def _print(found: ModelMemory) -> None:
    """Print what a device must have, in GiB. A choice that is the same in all rows has no column."""
    choices = {
        "precision": [row.precision for row in found.rows],
        "trains": [_trained(row) for row in found.rows],
        "optimizer": [row.optimizer for row in found.rows],
        "shares": [row.sharding.name.lower() for row in found.rows],
        "sequence": [f"{row.sequence_length:,}" for row in found.rows],
        "micro-batch": [str(row.micro_batch) for row in found.rows],
    }
    alike = {name: values[0] for name, values in choices.items() if len(set(values)) == 1}
    sizes = {
        **{
            _HEADINGS.get(part, part): [row.parts_bytes[part] for row in found.rows]
            for part in found.rows[0].parts_bytes
        },
        "total": [row.total_bytes for row in found.rows],
        "host": [row.host_bytes for row in found.rows],
    }
    if not any(sizes["host"]):
        del sizes["host"]
    columns: dict[str, Align] = {name: "left" for name in choices if name not in alike}
    columns |= dict.fromkeys(sizes, "right")
    cells = [values for name, values in choices.items() if name not in alike]
    cells += [[f"{gib(size):,.2f}" for size in values] for values in sizes.values()]
    print_line(found.summary(), style="bold")
    print_line("GiB of each device; " + ", ".join(f"{name} {value}" for name, value in alike.items()))
    print_line()
    print_table(columns, zip(*cells, strict=True))


_HEADINGS = {"weights": "parameters", "optimizer": "states", "beside the allocator": "beside"}
"""Headings of the parts that have another name in the table."""


def _trained(row: MemoryRow) -> str:
    return f"LoRA {row.lora_rank}" if row.lora_rank else "all"
