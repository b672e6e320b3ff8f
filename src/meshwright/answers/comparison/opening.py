"""Arguments of `compare` and `report` as sides.

FOLDER                                      a record, or all records at and below the folder
RUN.yaml, or the name of one that ships     the cost model's estimate
claim:ID,...                                printed figures
mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK     published results; with * the mean over submitters
points:KEY=TEXT,...                         published rates of inference
NAME=...                                    any of these, under a name
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwright import runfile
from meshwright.answers.comparison.record_sides import read_side, record_folders
from meshwright.answers.comparison.sides import Side, SideValue, Statistic, shortened
from meshwright.catalog.lookup import run_file_names
from meshwright.errors import InputError
from meshwright.specs.run import Run

_NAMED = re.compile(r"(?P<name>[^=:/]+)=(?P<item>.+)", re.DOTALL)
_PUBLISHED = ("claim", "mlperf", "points")


def open_sides(items: Sequence[str], *, read_run: Callable[[Path], Run] = runfile.load) -> list[Side]:
    """One side for each argument; names that repeat are numbered. `read_run` reads a run file."""
    sides = [open_side(item, read_run=read_run) for item in items]
    counts = Counter(s.name for s in sides)
    sides = [
        replace(s, name="/".join(Path(item).parts[-2:])) if counts[s.name] > 1 and Path(item).is_dir() else s
        for s, item in zip(sides, items, strict=True)
    ]
    seen: Counter[str] = Counter()
    found = []
    for side in sides:
        seen[side.name] += 1
        found.append(replace(side, name=f"{side.name} ({seen[side.name]})") if seen[side.name] > 1 else side)
    return found


def open_side(item: str, *, read_run: Callable[[Path], Run]) -> Side:
    """The side of one argument. Raises InputError with file and field where a record is damaged."""
    from meshwright.answers.comparison.published_sides import claim_side, estimate_side, mlperf_side, points_side

    if not item.strip():
        raise InputError("an empty name is no side", got=item, allowed="a folder, a run file or a published figure")
    named = _NAMED.fullmatch(item)
    is_named = named is not None and named["name"].strip().lower() not in _PUBLISHED and not Path(item).exists()
    name, rest = (named["name"].strip(), named["item"]) if named and is_named else ("", item)
    kind, colon, query = rest.partition(":")
    if colon and kind in _PUBLISHED:
        opened = {"claim": claim_side, "mlperf": mlperf_side, "points": points_side}[kind]
        return opened(query, name=name)
    path = Path(rest)
    if path.is_dir():
        return folder_side(path, name=name or (path.resolve().name or str(path)))
    if path.is_file() and path.suffix not in (".yaml", ".yml"):
        folder = path.parent
        raise InputError("a record is named by its folder", got=rest, hint=f"name {folder}")
    if path.suffix in (".yaml", ".yml") or rest in run_file_names():
        return estimate_side(path, name=name or path.stem, read_run=read_run)
    raise InputError(
        "neither a folder of records, nor a run file, nor a published figure", got=item,
        allowed="FOLDER, RUN.yaml, claim:ID, mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK, points:KEY=TEXT",
        hint="NAME=... gives a side a name",
    )  # fmt: skip


def folder_side(folder: Path, *, name: str) -> Side:
    """All records of a folder as one side. Repeated measurements become samples of one value."""
    found = record_folders(folder)
    if not found:
        raise InputError(
            "there is no record at or below this folder", got=str(folder),
            allowed="records of train, bench device, train, serve, offline or ingest, or mlperf run",
        )  # fmt: skip
    if len(found) == 1:
        return read_side(*next(iter(found.items())), name=name)
    sides, unreadable = [], []
    for path, mark in found.items():
        try:
            sides.append(read_side(path, mark, name=name))
        except InputError as error:
            unreadable.append(error.message)
    if not sides:
        raise InputError(f"no record can be read: {unreadable[0]}", got=str(folder))
    values = merged([value for side in sides for value in side.values])
    facts = {key: _listed([s.facts.get(key, "") for s in sides]) for key in sides[0].facts}
    breakdowns = {workload: b for side in sides for workload, b in side.breakdowns.items()}
    if len({v.workload for v in values}) < len({id(s) for s in sides if s.breakdowns}):
        breakdowns = {}  # several profiles of one workload
    return Side(
        name=name, kind=_listed([s.kind for s in sides]), values=values, facts=facts, breakdowns=breakdowns,
        unreadable=tuple(unreadable), cautions=tuple(text for s in sides for text in s.cautions),
    )  # fmt: skip


_MAY_VARY = ("software date",)


def merged(values: Sequence[SideValue]) -> tuple[SideValue, ...]:
    """Values of one workload under the same conditions as one, the median; under others each with what differs."""
    groups: dict[tuple[str, str], list[SideValue]] = {}
    for value in values:
        groups.setdefault((value.workload, value.metric.name), []).append(value)
    found: list[SideValue] = []
    for group in groups.values():
        alike: dict[tuple[tuple[str, str], ...], list[SideValue]] = {}
        for value in group:
            key = tuple(item for item in sorted(value.conditions.items()) if item[0] not in _MAY_VARY)
            alike.setdefault(key, []).append(value)
        differing = _differing(list(alike))
        for same in alike.values():
            named = ", ".join(same[0].conditions.get(key, "not stated") for key in differing)
            found.append(_median(same, workload=same[0].workload + (f", {named}" if named else "")))
    return tuple(found)


def _differing(keys: Sequence[tuple[tuple[str, str], ...]]) -> list[str]:
    if len(keys) < 2:
        return []
    dicts = [dict(key) for key in keys]
    return [n for n in dict.fromkeys(n for d in dicts for n in d) if len({d.get(n) for d in dicts}) > 1]


def _median(same: Sequence[SideValue], *, workload: str) -> SideValue:
    if len(same) == 1:
        return replace(same[0], workload=workload)
    samples = sorted(v.value for v in same)
    return replace(
        same[0], workload=workload, value=median(samples), samples=tuple(samples), statistic=Statistic.MEDIAN,
        sampled="record", low=None, high=None,
    )  # fmt: skip


def _listed(texts: Sequence[str]) -> str:
    return shortened(list(dict.fromkeys(t for t in texts if t)), most=3)
