"""Run files out: the same file with the plan pinned or other values changed, comments kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.json_values import dump_yaml
from meshwright.runfile.document import in_full
from meshwright.runfile.pinned import section_from_plan
from meshwright.runfile.reading import loads
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run, with_plan


def pin_plan(run: Run, plan: Plan, out: str | os.PathLike[str]) -> None:
    """Write the file that `run` came from to `out`, with `plan` in place of its `parallel` and `batch.micro`.

    The whole file appears or none of it. Raises `InputError` where `out` cannot be written.
    """
    write_text(pinned_text(run, plan), out)


def write_text(text: str, out: str | os.PathLike[str]) -> None:
    """Write a run file: all of it or nothing. Raises `InputError` where `out` cannot be written."""
    try:
        write_atomically(Path(out), text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {os.fspath(out)!r} ({reason})") from None


def pinned_text(run: Run, plan: Plan) -> str:
    """The text of a run file that says `plan` and otherwise what `run` says, overrides included."""
    pinned = with_plan(run, plan)
    values = {"batch.micro": plan.micro_batch, "parallel": section_from_plan(plan)}
    return changed_text(pinned, values, wanted=pinned, what="the plan")


def stated_text(run: Run) -> str:
    """The text of `run`'s file with the overrides written into it. What code has changed since is not in it."""
    if not run.overrides:
        return run.text
    as_read = loads(run.text, file=run.source, overrides=run.overrides, here=run.cluster)
    return changed_text(as_read, {}, wanted=as_read, what="an override")


def replay_text(run: Run, plan: Plan) -> str:
    """`stated_text` with `plan` pinned, where the file can say it."""
    try:
        as_read = loads(run.text, file=run.source, overrides=run.overrides, here=run.cluster)
        return pinned_text(as_read, plan)
    except InputError:
        return stated_text(run)


def changed_text(run: Run, values: Mapping[str, Any], *, wanted: Run, what: str) -> str:
    """The text of a run file that says `values` (by `key.path`) and otherwise what `run` says, overrides included.

    It is read again, and must describe `wanted`. Raises `InputError` where it does not: `what` cannot be said in it.
    """
    text = _with_values(run, values)
    reread = loads(text, file=run.source, here=run.cluster)
    same = {"text": text, "overrides": (), "is_engine_open": reread.is_engine_open}  # a chosen engine is written down
    if replace(reread, name=run.name) != replace(wanted, **same):
        raise InputError(f"{run.source}: {what} cannot be pinned in this file", hint="remove its aliases (*)")
    return text


SECTION_HERE, MICRO_HERE = "PARALLEL_SECTION_HERE", "MICRO_BATCH_HERE"
"""Marks in a template that lacks the values of `parallel` and `batch.micro`."""


def plan_template(run: Run) -> str:
    """The run file's text with `SECTION_HERE` and `MICRO_HERE` where a pinned plan stands; overrides are included."""
    return _with_values(run, {"batch.micro": MICRO_HERE, "parallel": SECTION_HERE})


def given_section(run: Run, name: str) -> dict[str, Any]:
    """Return the section `name` as the run file states it, overrides included; empty where there is none."""
    return _content(run, YAML()).get(name) or {}


def _with_values(run: Run, values: Mapping[str, Any]) -> str:
    yaml = YAML()  # round trip: keeps comments, order and the way numbers are written
    yaml.width = 4096  # never fold a line that the user did not fold
    content = _content(run, yaml)
    for key, value in values.items():
        _set(content, key.split("."), value)
    return dump_yaml(content, yaml=yaml)


def _content(run: Run, yaml: YAML) -> Any:
    """The content of the run file with its overrides."""
    content = yaml.load(run.text)
    for assignment in run.overrides:
        key, _, value = assignment.partition("=")
        _set(content, key.strip().split("."), YAML().load(value))
    return content


def _set(content: Any, path: list[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        if content.get(key) is None:
            content[key] = {}
        elif isinstance(content[key], str):
            content[key] = in_full(path[:depth], content[key], key=path[depth])
        content = content[key]
    content[path[-1]] = value
