"""Configurations that `bench train` trains: run files times swept values.

    --sweep batch.micro=1,2 --sweep precision=bf16,fp32   ->   four configurations of every run file

Only steps are measured. Checkpoints, validation and trackers of a run file are switched off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError, RunFileError
from meshwright.runfile import document as documents
from meshwright.runfile import load
from meshwright.runfile.schema import RunFile
from meshwright.runfile.validate import validate

ONLY_STEPS = ("train.checkpoint=null", "train.evaluate=null", "train.trackers=[]", "train.faults={}")
MAX_CONFIGURATIONS = 1000
OPENING, CLOSING, QUOTES = "[{", "]}", "'\""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One key of the run file and its values, as YAML."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run file with its overrides."""

    name: str  # run file and swept values
    path: str
    assignments: tuple[str, ...]  # swept values: key=value
    overrides: tuple[str, ...]  # all of them, in order
    engine: str
    digest: str  # of the run file and all overrides
    refusal: str = ""  # reason why the run file is invalid


def parse_sweep(text: str) -> Sweep:
    """Parse `batch.micro=1,2`. Commas inside brackets, braces and quotes do not separate values.

    >>> parse_sweep("optimizer.betas=[0.9, 0.95],[0.8, 0.9]").values
    ('[0.9, 0.95]', '[0.8, 0.9]')
    """
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in _split_values(values))
    if not key.strip() or not equals or "" in found:
        raise InputError("--sweep must read key=value,value", got=text, hint="--sweep batch.micro=1,2,4")
    if len(set(found)) < len(found):
        raise InputError("--sweep names a value twice", got=text)
    return Sweep(key=key.strip(), values=found)


def _split_values(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in QUOTES:
            quote = char
        depth += (char in OPENING) - (char in CLOSING) if not quote else 0
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def configurations(
    paths: Sequence[str | os.PathLike[str]], *, sweeps: Sequence[Sweep] = (), overrides: Sequence[str] = (), steps: int
) -> list[Configuration]:
    """All combinations of run files and swept values, in order, with `steps` steps each.

    Raises InputError for an unknown key or a value of another kind. An invalid combination becomes a configuration with
    a refusal; if all are refused, the error of the first is raised.
    """
    keys = [sweep.key for sweep in sweeps]
    if len(set(keys)) < len(keys):
        raise InputError("--sweep names a key twice", got=next(k for k in keys if keys.count(k) > 1))
    texts = [os.fspath(path) for path in paths]
    if len(set(texts)) < len(texts):
        raise InputError("a run file is named twice", got=next(t for t in texts if texts.count(t) > 1))
    stems = [Path(text).stem for text in texts]
    names = {t: stem if stems.count(stem) == 1 else t for t, stem in zip(texts, stems, strict=True)}
    combinations: list[tuple[str, ...]] = [()]
    for sweep in sweeps:
        combinations = [(*c, f"{sweep.key}={value}") for c in combinations for value in sweep.values]
    if len(names) * len(combinations) > MAX_CONFIGURATIONS:
        raise InputError(
            "too many configurations", got=len(names) * len(combinations), allowed=f"<= {MAX_CONFIGURATIONS}"
        )
    found, errors = [], []
    for path, name in names.items():
        for swept in combinations:
            made, error = _configuration(path, name, swept, overrides, steps)
            found.append(made)
            errors += [] if error is None else [error]
    if len(errors) == len(found):
        raise errors[0]
    return found


def _configuration(
    path: str, name: str, swept: tuple[str, ...], overrides: Sequence[str], steps: int
) -> tuple[Configuration, RunFileError | None]:
    text = documents.read_text(path)
    asked = [*ONLY_STEPS, *overrides, *swept]
    settings = _settings(text, path, asked)
    asked += [f"train.steps={steps}", "train.tokens=null", "train.epochs=null"]
    if settings.optimizer.warmup_steps > steps:
        asked.append(f"optimizer.warmup_steps={steps}")
    error = None
    try:
        load(path, overrides=asked)
    except RunFileError as refused:
        error = refused
    made = Configuration(
        name=" ".join([name, *(_short(assignment) for assignment in swept)]),
        path=path,
        assignments=swept,
        overrides=tuple(asked),
        engine=settings.engine,
        digest=hashlib.sha256(json.dumps([text, asked]).encode()).hexdigest()[:12],
        refusal="" if error is None else error.message,
    )
    return made, error


def _settings(text: str, path: str, overrides: Sequence[str]) -> RunFile:
    """The run file with `overrides`, validated."""
    document = documents.parse(text, file=path)
    for assignment in overrides:
        document = documents.override(document, assignment)
    settings = validate(document)
    if settings.train.checkpoint is not None:
        raise InputError("nothing is saved here: train.checkpoint must stay null")
    return settings


def _short(assignment: str) -> str:
    """Remove the section: `batch.micro=2` becomes `micro=2`."""
    key, _, value = assignment.partition("=")
    return f"{key.rpartition('.')[2]}={value}"
