"""The environment of every process: the table's rows for this accelerator and engine, and overrides.

Later sources win: the table, the engine, the site file, the shell that processes inherit, `--env`. Each flag of a
variable that holds flags (XLA_FLAGS) is an entry, so that one can be changed and the others stay.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import toml_table

_TABLE = Path(__file__).parent / "data" / "environment.toml"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FLAGGED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that hold a list of flags."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentVariable:
    """One variable, with the reason and source of its value."""

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
    given: Mapping[str, str | None] | None = None,
    folder: Path,
    user: str | None = None,
) -> tuple[EnvironmentVariable, ...]:
    """Return all variables by name.

    vendor, architecture   as in the catalogue; None: unknown, only rows for every device apply
    site                   the site file's keys that rows may name
    layers                 source -> name -> value, applied to the table in this order; None removes a variable
    inherited              variables of the shell in which `launch` runs; they override all above
    given                  variables of the command line, which override all others
    folder                 of the results, as the processes see it
    user                   name in paths; None: the user of this process

    Raises InputError for a name or a value that no environment can hold.
    """
    entries: dict[tuple[str, str], EnvironmentVariable] = {}
    own = {"vendors": vendor, "architectures": architecture, "engines": engine}
    single = {"multi_node": num_nodes == 1, "multi_process": devices_per_node == 1}
    for row in rows():
        value = _value(row, site, folder=folder, user=user)
        if value is not None and _applies(row, own, single=single):
            entries[row["name"], _flag_of(row["name"], value)] = EnvironmentVariable(
                name=row["name"], value=value, reason=row["reason"], source=row["source"]
            )
    names = {name for layer in layers.values() for name in layer} | {name for name, _ in entries}
    shell = {name: value for name, value in (inherited or {}).items() if name in names}
    for who, layer in {**layers, "this shell": shell, "--env": given or {}}.items():
        for name, value in layer.items():
            _override(entries, name, value, who=who)
    names = dict.fromkeys(name for name, _ in sorted(entries))
    return tuple(_joined([v for (own, _), v in sorted(entries.items()) if own == name]) for name in names)


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """Return the rows of the table."""
    return tuple(toml_table(_TABLE)["variable"])


def table_version() -> str:
    """Return the date of the table."""
    return toml_table(_TABLE)["version"]


def _value(row: Mapping[str, Any], site: Mapping[str, Any], *, folder: Path, user: str | None) -> str | None:
    if "site" in row:
        value = site.get(row["site"])
        if value is not None and row["site"] == "rdma_devices":
            return _exact(value)
        return None if value is None else str(value)
    value = (row.get("flag") or row["value"]).replace("{folder}", str(folder))
    return value.replace("{user}", user or _user()) if "{user}" in value else value


def _exact(ports: str) -> str:
    """Names of RDMA ports for NCCL_IB_HCA, which takes them as prefixes unless `=` stands before them.

    >>> _exact("mlx5_0,mlx5_1:1"), _exact("mlx5"), _exact("^mlx5_4")
    ('=mlx5_0,mlx5_1:1', 'mlx5', '^mlx5_4')
    """
    names = ports.split(",")
    return f"={ports}" if all(re.fullmatch(r"(?!mlx\d$)\w*\d(:\d+)?", name.strip()) for name in names) else ports


def _user() -> str:
    """Return the user of this process; the number if it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _applies(row: Mapping[str, Any], own: Mapping[str, str | None], *, single: Mapping[str, bool]) -> bool:
    """True if a row applies. `own`: vendor, architecture and engine by key; `single`: what exists only once, by key."""
    return all(key not in row or value in row[key] for key, value in own.items()) and not any(
        row.get(key, False) and is_single for key, is_single in single.items()
    )


def _flag_of(name: str, value: str) -> str:
    """Return the flag's name, which identifies an entry of a variable with flags; empty for other variables."""
    return value.partition("=")[0] if name in FLAGGED else ""


def _override(entries: dict[tuple[str, str], EnvironmentVariable], name: str, value: str | None, *, who: str) -> None:
    if not NAME.fullmatch(name):
        raise InputError(f"{who}: this cannot be the name of a variable", got=name, allowed="letters, digits and _")
    if value is None:
        for key in [key for key in entries if key[0] == name]:
            del entries[key]
        return
    if any(ord(c) < 32 for c in value):
        raise InputError(f"{who}: {name} holds a control character", got=value)
    for part in value.split() if name in FLAGGED else [value]:
        entries[name, _flag_of(name, part)] = EnvironmentVariable(name=name, value=part, reason="as given", source=who)


def _joined(entries: list[EnvironmentVariable]) -> EnvironmentVariable:
    def combined(key: str) -> str:
        return "; ".join(dict.fromkeys(getattr(v, key) for v in entries))

    return EnvironmentVariable(
        name=entries[0].name,
        value=" ".join(v.value for v in entries),
        reason=combined("reason"),
        source=combined("source"),
    )
