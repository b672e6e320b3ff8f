"""The tuned table of a device: for each call that was measured, the fastest route.

A JSON document of one device and one version of PyTorch and Triton, which `meshwright bench kernels` writes and a run
reads by its `kernels.tuned`. Imports no PyTorch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import document_of, write_atomically
from meshwright.json_values import parse_json
from meshwright.kernels.operations import OPERATIONS

SCHEMA = "meshwright kernel tuning 1"
MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class TunedCall:
    """A call that was measured, as in `routes.KernelCall`."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TunedTable:
    """Fastest routes on `device` with these versions."""

    device: str  # as its driver has it
    torch: str
    triton: str | None
    routes: Mapping[TunedCall, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file at `path`."""
        calls = [{**asdict(call), "route": route} for call, route in self.routes.items()]
        document = {
            "schema": SCHEMA, "device": self.device, "torch": self.torch, "triton": self.triton, "calls": calls,
        }  # fmt: skip
        write_atomically(path, json.dumps(document, indent=1) + "\n")


def triton_version() -> str | None:
    """The installed Triton; None without."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def load(path: str | os.PathLike[str]) -> TunedTable:
    """Read the table at `path`. Raises InputError where it is none, or names an unknown operation or route."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as stream:
            document = parse_json(stream.read(MOST_BYTES + 1))
        document_of(document, schema=SCHEMA, refusal=f"{name}: no table of tuned kernels")
        return TunedTable(
            device=str(document["device"]),
            torch=str(document["torch"]),
            triton=None if document["triton"] is None else str(document["triton"]),
            routes=dict(_entry(name, row) for row in document["calls"]),
        )
    except OSError as error:
        raise InputError(f"table of tuned kernels {name!r} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{name} is no table of tuned kernels ({type(error).__name__}: {error})") from None


def _entry(name: str, row: Mapping[str, Any]) -> tuple[TunedCall, str]:
    op, route = row["op"], row["route"]
    if op not in OPERATIONS or route not in OPERATIONS[op].routes:
        raise InputError(f"{name} names an operation or route that this version has not", got=f"{op}: {route}")
    shapes = tuple(tuple(int(size) for size in shape) for shape in row["shapes"])
    return TunedCall(op=op, shapes=shapes, dtypes=tuple(str(d) for d in row["dtypes"])), route
