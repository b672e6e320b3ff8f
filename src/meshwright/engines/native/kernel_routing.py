"""Routes of training kernels for a run: from its `kernels:` block, the tuned table of the device and the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.kernels import tuned
from meshwright.kernels.architectures import architecture_of
from meshwright.kernels.dispatch import KernelRouting, summary
from meshwright.kernels.routes import ANY, KernelCall, routes_of
from meshwright.specs.run import Run
from meshwright.training import device as devices

FORMATS = {"fp32": "float32", "fp16": "float16"}
"""Formats of activations by the name of the precision; bf16 for all others."""


def routing_of(run: Run, *, device: torch.device) -> KernelRouting:
    """The routing of `run` on `device`. Raises InputError for a table of another device or other versions."""
    table = None
    if run.kernels.tuned is not None:
        table = tuned.load(run.kernels.tuned)
        here = (devices.device_name(device), torch.__version__, tuned.triton_version())
        there = (table.device, table.torch, table.triton)
        if there != here:
            raise InputError(
                f"kernels.tuned: {run.kernels.tuned} was measured elsewhere",
                got="{}, PyTorch {}, Triton {}".format(*there),
                allowed="{}, PyTorch {}, Triton {}".format(*here),
                hint="`meshwright bench kernels` measures here",
            )
    return KernelRouting(demanded=run.kernels.routes, tuned=table)


def require(run: Run, *, device: torch.device) -> None:
    """Raise InputError where a route that the run names cannot serve any call on `device`, before a process starts."""
    routing_of(run, device=device)
    for op, name in run.kernels.routes.items():
        call = KernelCall(
            op=op,
            shapes=((1, 1), (1, 1)),
            dtypes=(FORMATS.get(run.precision.name, "bfloat16"),),
            device=device.type,
            architecture=architecture_of(device),
            flags=frozenset({"silu", ANY}),
        )
        refusal = routes_of(op)[name].serves(call)
        if refusal is not None:
            able = [other for other, route in routes_of(op).items() if route.serves(call) is None]
            raise InputError(
                f"kernels.routes.{op}: {name} does not run here: {refusal.reason}", allowed=", ".join(able)
            )


def gathered_choices(routing: KernelRouting, *, num_ranks: int) -> tuple[dict[str, Any], ...]:
    """The distinct choices of all processes, each with the ranks that made it; empty but in the first process.

    All processes call it. `calls` is the largest number of one process: ranks of a stage make the same ones.
    """
    rows = summary(routing)
    if num_ranks == 1:
        return merged_choices([rows])
    found: list[Any] | None = [None] * num_ranks if dist.get_rank() == 0 else None
    dist.gather_object(rows, found)
    return merged_choices(found or ())


def merged_choices(rows_of_ranks: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """The distinct rows of all ranks, in the order in which they first appear."""
    merged: dict[str, dict[str, Any]] = {}
    ranks: dict[str, list[int]] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            key = json.dumps({name: value for name, value in row.items() if name != "calls"}, sort_keys=True)
            known = merged.setdefault(key, dict(row))
            known["calls"] = max(known["calls"], row["calls"])
            ranks.setdefault(key, []).append(rank)
    return tuple(row | {"ranks": ranges_text(ranks[key])} for key, row in merged.items())


def ranges_text(numbers: Sequence[int]) -> str:
    """Rising numbers as ranges.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, ends)) for ends in found)


def notes_on_routes(run: Run, choices: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Notes on routes that a run names for operations that no process called."""
    called = {row["op"] for row in choices}
    uncalled = (op for op in run.kernels.routes if op not in called)
    return tuple(f"kernels.routes.{op}: no process called {op}" for op in uncalled)
