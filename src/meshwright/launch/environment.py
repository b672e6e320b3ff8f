"""The environment of every process: the table's rows for this accelerator and engine, and what others lay over it.

Later ones win: the table, the engine, the site file, the shell that processes inherit, `--env`. Of a variable that
holds flags (XLA_FLAGS) each flag is one entry, so that one can be changed and the others stay.
"""

from __future__ import annotations

import getpass
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.errors import InputError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FLAGGED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that hold flags."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentVariable:
    """One variable and why it has its value."""

    name: str
    value: str
    reason: str
    source: str


def environment(
    *,
    vendor: str | None,
    architecture: str | None,
    engine: str,
    num_nodes: int,
    devices_per_node: int,
    site: Mapping[str, Any],
    layers: Mapping[str, Mapping[str, str | None]],
    inherited: Mapping[str, str] | None = None,
    said: Mapping[str, str | None] | None = None,
    user: str | None = None,
) -> tuple[EnvironmentVariable, ...]:
    """All variables, by name.

    vendor, architecture   the catalogue's words; None: not known, only rows for every device apply
    site                   the site file's keys that rows may name
    layers                 who says so -> name -> value, laid over the table in their order; None takes one away
    inherited              what processes get from the shell in which `launch` is given: it wins over what is set so far
    said                   on the command line: the last word
    user                   in paths; None: who runs this process

    Raises InputError for a name or a value that no environment can hold.
    """
    entries: dict[tuple[str, str], EnvironmentVariable] = {}
    own = {"vendors": vendor, "architectures": architecture, "engines": engine}
    alone = {"multi_node": num_nodes == 1, "multi_process": devices_per_node == 1}
    for row in rows():
        value = _value(row, site, user=user)
        if value is not None and _applies(row, own, alone=alone):
            entries[row["name"], _flag_of(row["name"], value)] = EnvironmentVariable(
                name=row["name"], value=value, reason=row["reason"], source=row["source"]
            )
    names = {name for layer in layers.values() for name in layer} | {name for name, _ in entries}
    shell = {name: value for name, value in (inherited or {}).items() if name in names}
    for who, layer in {**layers, "this shell": shell, "--env": said or {}}.items():
        for name, value in layer.items():
            _lay(entries, name, value, who=who)
    names = dict.fromkeys(name for name, _ in sorted(entries))
    return tuple(_joined([v for (own, _), v in sorted(entries.items()) if own == name]) for name in names)


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """The table as it is written."""
    return tuple(_data()["variable"])


def table_version() -> str:
    """The date of the table."""
    return _data()["version"]


@cache
def _data() -> dict[str, Any]:
    text = (files("meshwright.launch") / "data" / "environment.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _value(row: Mapping[str, Any], site: Mapping[str, Any], *, user: str | None) -> str | None:
    if "site" in row:
        value = site.get(row["site"])
        return None if value is None else str(value)
    value = row.get("flag") or row["value"]
    return value.replace("{user}", user or _user()) if "{user}" in value else value


def _user() -> str:
    """Who runs this process; its number where it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _applies(row: Mapping[str, Any], own: Mapping[str, str | None], *, alone: Mapping[str, bool]) -> bool:
    """own: vendor, architecture and engine, by their key of a row; alone: what there is only one of, likewise."""
    return all(key not in row or value in row[key] for key, value in own.items()) and not any(
        row.get(key, False) and is_alone for key, is_alone in alone.items()
    )


def _flag_of(name: str, value: str) -> str:
    """What tells entries of one variable apart: the flag's name; nothing where the value is one."""
    return value.partition("=")[0] if name in FLAGGED else ""


def _lay(
    entries: dict[tuple[str, str], EnvironmentVariable], name: str, value: str | None, *, who: str
) -> None:
    if not NAME.fullmatch(name):
        raise InputError(
            f"{who}: this cannot be the name of a variable", got=name, allowed="letters, digits and _"
        )
    if value is None:
        for key in [key for key in entries if key[0] == name]:
            del entries[key]
        return
    if any(ord(c) < 32 for c in value):
        raise InputError(f"{who}: {name} holds a control character", got=value)
    for part in value.split() if name in FLAGGED else [value]:
        entries[name, _flag_of(name, part)] = EnvironmentVariable(
            name=name, value=part, reason="as said", source=who
        )


def _joined(entries: list[EnvironmentVariable]) -> EnvironmentVariable:
    def words(key: str) -> str:
        return "; ".join(dict.fromkeys(getattr(v, key) for v in entries))

    return EnvironmentVariable(
        name=entries[0].name,
        value=" ".join(v.value for v in entries),
        reason=words("reason"),
        source=words("source"),
    )
