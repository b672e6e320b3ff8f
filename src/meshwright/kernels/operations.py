"""The operations of this room and the names of their routes, as a table for run files too. Imports no PyTorch.

The module of an operation has `ROUTES`, all its routes by name; only its functions import Triton. The module of its
kernels has `SOURCES`, which `inspection` compiles.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: its formula, the modules of its routes and of its Triton kernels, names of its routes."""

    name: str
    computes: str
    module: str
    kernels: str | None
    routes: tuple[str, ...]


TRITON = "triton"
"""The route of our own kernels."""


STORED_FORMATS = ("e4m3", "int8")
"""Formats of stored activations. Modules without a format get the first: `docs/reference/convergence.md`."""


def _operations() -> Iterator[Operation]:
    text = (Path(__file__).parent / "data" / "operations.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        module, kernels = (f"{__package__}.{row[key]}" for key in ("module", "kernels"))
        routes = tuple(row["routes"].split())
        yield Operation(name=name, computes=row["computes"], module=module, kernels=kernels, routes=routes)


OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _operations()}
"""Every operation by name."""
