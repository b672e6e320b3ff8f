"""Columns of a table of runs under the names that other tables give them, with their units.

A name is compared without case, spaces and signs: "Step time (ms)" is `step_time_ms`. Columns that no table
here has are not read; `notes_on_columns` names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from meshwright.accuracy.csvfile import Column, CsvRow
from meshwright.accuracy.rates import RATE_COLUMNS, rate_unit
from meshwright.accuracy.shipped import column_names, shipped_columns
from meshwright.accuracy.statements import read_statements
from meshwright.accuracy.tablefile import read_lines
from meshwright.runfile.synonyms import key_for

_PLAIN = (
    (r"(?:elapsed|training|avg|average|mean|median|total|max|maximum|peak|achieved|throughput|reserved)_", ""),
    (r"_sec(?:ond)?s?(?=_|$)", "_s"),
    (r"_per_", "_"),
)
"""Words of a name that change nothing, and shorter ones: "Elapsed training step time (s)" is "Step time (s)"."""

_AMBIGUOUS = ("batch_size", "batch")
"""Names that some tables give the global and others the micro-batch."""

_SEPARATORS = r"[,;()+]"
"""Signs between a framework, its version and what else their cells say."""

PRINTED_RATE = "tokens_per_s_per_gpu"
"""A rate as its source prints it; read only from a table without `tok_s_gpu_best`."""

MEASURES = ("tok_s_gpu_best", "step_time_s", "tflops_per_gpu", "mfu_pct", "hfu_pct", "mem_gb_per_gpu", *RATE_COLUMNS)
"""Columns of which a table of measured runs has one or more."""


def our_columns(header: Sequence[str]) -> list[Column]:
    """The columns of `header`: renamed where they have another table's name and the file has not ours.

    >>> [c.name for c in our_columns(["GPU type", "# GPUs", "Step time (ms)", "Weather"])]
    ['gpu', 'num_gpus', 'step_time_s', 'Weather']
    """
    taken, found = set(header), []
    for name in header:
        ours = name in shipped_columns() and name != PRINTED_RATE
        column = Column(name=name) if ours else _known_as(name)
        if column is None or (column.name != name and column.name in taken):
            column = Column(name=name)
        taken.add(column.name)
        found.append(column)
    return found


def notes_on_columns(path: Path) -> list[str]:
    """Sentences on the columns of a file that are read under another name, and on those that are not read."""
    table = read_lines(path)
    header, lines = table.header, [line for line in table.lines if len(line.cells) == len(table.header)]
    columns = list(zip(header, our_columns(header), strict=True))
    renamed = [f"{name} as {c.name}{_unit(c)}" for name, c in columns if c.name != name]
    others = [name for name, c in columns if c.name == name and name and name not in shipped_columns()]
    as_notes = [name for name in others if any(_states(name, line.cells[header.index(name)]) for line in lines)]
    unread = [name for name in others if name not in as_notes]
    notes = [f"columns read under our names: {', '.join(renamed)}"] if renamed else []
    notes += [f"columns read as notes: {', '.join(as_notes)}"] if as_notes else []
    return notes + ([f"columns that are not read: {', '.join(unread)}"] if unread else [])


def with_switches_as_notes(row: CsvRow) -> CsvRow:
    """`row` with everything in its note that states a switch: cells of columns that are none of ours, and words beside
    the framework and its version ("2025-09, no compile").
    """
    others = {name: cell for name, cell in row.cells.items() if name and name not in shipped_columns()}
    for name, cell in others.items():  # a second column of one meaning, where the first is empty
        known = _known_as(name)
        if cell and known and known == Column(name=known.name) and not row.text(known.name):
            row = replace(row, cells=row.cells | {known.name: cell})
    stated = [f"{name}: {cell}" for name, cell in others.items() if _states(name, cell)]
    software = re.split(_SEPARATORS, f"{row.text('framework')}; {row.text('framework_version')}")
    stated += [text.strip() for text in software if _switches(text)]
    if not stated:
        return row
    return replace(row, cells=row.cells | {"notes": "; ".join(filter(None, (row.text("notes"), *stated)))})


def _states(name: str, cell: str) -> bool:
    """True where a column of an unknown name and its cell name a switch: "Dispatcher" and "DeepEP"."""
    return bool(cell) and any(clause.mentions for clause in read_statements(f"{name}: {cell}").clauses)


def _switches(text: str) -> bool:
    """True where the text beside a framework states a switch, and not only a number: a release is one."""
    mentions = [m for clause in read_statements(text).clauses for m in clause.mentions]
    return any(m.value is not None and m.value != m.number for m in mentions)


def _unit(column: Column) -> str:
    if column.is_ratio:
        return " (shares where none exceeds 1, else percent)"
    return "" if column.scale == 1.0 else f" (times {column.scale:g})"


@cache
def _known_as(name: str) -> Column | None:
    word = re.sub(r"[^a-z0-9]+", "_", name.lower().replace("%", " percent ")).strip("_")
    plain = word
    for pattern, spelling in _PLAIN:
        plain = re.sub(pattern, spelling, plain)
    parted = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")  # SeqLen
    return _of_word(word) or _of_word(plain) or _of_word(parted)


def _of_word(word: str) -> Column | None:
    if ratio := column_names()["ratios"].get(word):
        return Column(name=ratio, is_ratio=True)
    if word in shipped_columns() and word != PRINTED_RATE:
        return Column(name=word)
    for entry in column_names()["scaled"]:
        if word in entry["names"]:
            return Column(name=entry["column"], scale=entry["factor"])
    for ours, names in column_names()["names"].items():
        if word in names:
            return Column(name=ours)
    if unit := rate_unit(word):
        ours = "tok_s_gpu_best" if (unit.amount, unit.owner) == ("tokens", "device") else unit.column
        return Column(name=ours, scale=unit.scale)
    ours = None if word in _AMBIGUOUS else column_names()["keys"].get(key_for(word) or "")
    return Column(name=ours) if ours in shipped_columns() else None
