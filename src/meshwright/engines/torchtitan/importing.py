"""Torchtitan's configurations as run files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines.base import Imported
from meshwright.engines.torchtitan.toml_files import import_toml
from meshwright.errors import InputError


def import_run(source: str, *, cluster: str) -> Imported:
    """The run on `cluster` that a configuration of torchtitan describes."""
    path = Path(source)
    if path.suffix == ".toml":
        return import_toml(path, cluster=cluster)
    raise InputError(
        "only torchtitan's TOML files are read", got=source, hint="its configuration modules are programs"
    )
