"""`meshwright kernels inspect`: compile kernels and print what came out. PyTorch is imported by the kernels."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from meshwright.cli.output import emit_json, exit_unless, load_with_torch, note, print_table
from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels.architectures import architectures
from meshwright.kernels.operations import OPERATIONS

if TYPE_CHECKING:
    from meshwright.kernels.inspection import InspectedKernel


def run(*, ops: tuple[str, ...], names: tuple[str, ...], as_json: bool) -> None:
    """Compile, print, and exit with 1 where a kernel is not as it should be."""
    for kind, given, known in (("operation", ops, OPERATIONS), ("architecture", names, architectures())):
        for name in given:
            if name not in known:
                raise UnknownNameError(kind, name, known=known)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise InputError("kernels cannot be compiled under TRITON_INTERPRET", hint="unset TRITON_INTERPRET")
    inspected = load_with_torch("meshwright.kernels.inspection:inspected", what="inspecting kernels")
    rows: list[InspectedKernel] = inspected(ops, names)
    faults = [fault for row in rows for fault in row.faults]
    if as_json:
        emit_json({"kernels": [asdict(row) for row in rows], "faults": faults})
    else:
        _print(rows)
        note(*faults)
    exit_unless(not faults)


def _print(rows: list[InspectedKernel]) -> None:
    columns = {
        "kernel": "left", "tile": "left", "architecture": "left", "registers": "right", "spilled": "right",
        "shared": "right", "occupancy": "right", "matrix": "right", "moved/least": "right",
    }  # fmt: skip
    print_table(
        columns,  # pyright: ignore[reportArgumentType]
        [
            (
                row.kernel, row.tile, row.architecture, row.registers, row.spilled_bytes, row.shared_bytes,
                f"{100 * row.occupancy:.0f} %", row.matrix_instructions, f"{row.moved_bytes / row.least_bytes:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip
