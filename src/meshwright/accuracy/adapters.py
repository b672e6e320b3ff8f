"""Adapters of a published row: whether it trains them, on which matrices, and the format of the base below them."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.shipped import wordings
from meshwright.accuracy.statements import Statements, read_statements
from meshwright.specs.model import QKV, BaseFormat, Lora

_SPLIT = ("query", "key", "value")
_ALL = (*_SPLIT, "output", "gate", "up", "down")
_BASE_ONLY = re.compile(r"q-?lora|(?:bnb[- ])?nf-?4|(?:int-?|uint-?)[48]\b|[48][- ]?bits?\b", re.IGNORECASE)
"""Beginnings of a precision cell that can only mean the frozen base of adapters."""


def trains_adapters(row: CsvRow) -> bool:
    """True if adapters are trained and the model's own weights stay: by task and model name, else by the note."""
    if re.search(r"lora|peft|adapter", f"{row.text('task')} {row.text('model')}", re.IGNORECASE):
        return True
    return row.text("task").lower() != "pretrain" and bool(read_statements(row.text("notes")).value("adapters"))


def with_compute_precision(row: CsvRow) -> CsvRow:
    """`row` without a precision that is the format of the base below its adapters."""
    if not trains_adapters(row) or not _BASE_ONLY.match(row.text("precision")):
        return row
    return replace(row, cells=row.cells | {"precision": ""})


def read_lora(row: CsvRow, default: Lora, notes: list[str]) -> Lora | None:
    """Return the adapters of `row`, None where it trains none; `notes` gets what it leaves to `default`."""
    if not trains_adapters(row):
        if adapters := read_statements(row.text("notes")).value("adapters"):
            notes.append(f"notes say {adapters} of the task: its column used, {row.text('task')}")
        return None
    # Only the statements on adapters are used.
    said = read_statements("; ".join(row.text(c) for c in ("notes", "task", "model", "precision") if row.text(c)))
    ranks = {int(m.number) for m in said.mentions("lora_rank")} - {0}
    targets = _targets(said.value("lora_targets") or "")
    lora = replace(
        default,
        rank=ranks.pop() if len(ranks) == 1 else default.rank,
        targets=targets or default.targets,
        base_format=_base_format(row, said, notes),
    )
    notes.append(f"LoRA rank {lora.rank} on {', '.join(lora.targets)}")
    return lora


def _targets(text: str) -> tuple[str, ...]:
    """Adapted matrices that `text` names, in the order of a layer; query, key and value apart where one is alone."""
    listed = wordings()["lora_target"]
    names = "|".join(f"(?P<t{i}>{entry['say']})" for i, entry in enumerate(listed))
    matches = re.finditer(rf"(?<!\w)(?:{names})(?= ?proj|[ ,/+&;\])]|$)", text)
    found = {t for m in matches for t in listed[int((m.lastgroup or "t0")[1:])]["targets"]}
    if found & {*_SPLIT} and QKV in found:
        found |= {*_SPLIT}
    if found & {*_SPLIT}:
        found -= {QKV}
    return tuple(t for t in (QKV, *_ALL) if t in found)


def _of_precision(cell: str) -> str:
    """Format of the base that a precision cell names; empty where it names the format of arithmetic."""
    if not _BASE_ONLY.match(cell):
        return ""
    return "int8" if "8" in cell else "4 bits"


def _base_format(row: CsvRow, said: Statements, notes: list[str]) -> BaseFormat:
    stated = (
        said.value("base_format")
        or _of_precision(row.text("precision"))
        or (said.value("adapters") == "qlora" and "4 bits")
    )
    if not stated:
        return BaseFormat.FULL
    if stated in (BaseFormat.INT8, BaseFormat.NF4):
        return BaseFormat(stated)
    if stated == "quantised" and re.search(r"fp[48]", row.text("precision"), re.IGNORECASE):
        notes.append(f"base weights in {row.text('precision')}, in which they are multiplied")
        return BaseFormat.FULL  # frozen weights are held in the format of their GEMMs
    why = "as QLoRA has them" if stated == "4 bits" else "the row says quantised"
    notes.append(f"base weights in nf4 with double quantisation, {why}")
    return BaseFormat.NF4_DOUBLE
