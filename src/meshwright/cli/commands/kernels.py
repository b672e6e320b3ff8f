"""`meshwright kernels`: a group of commands about training kernels."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from meshwright.cli.output import emitted_json, exit_unless, load_with_torch, note, print_table
from meshwright.cli.verbs import verb, verb_group
from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels.architectures import architectures
from meshwright.kernels.operations import OPERATIONS

if TYPE_CHECKING:
    from meshwright.kernels.inspection import InspectedKernel


@verb("kernels inspect")
@click.option(
    "--op", "ops", multiple=True, metavar="OPERATION",
    help="Only kernels of this operation. May be repeated.  [default: all]",
)  # fmt: skip
@click.option(
    "--architecture", "names", multiple=True, metavar="NAME",
    help="Only this architecture: sm90, sm100, gfx942, gfx950. May be repeated.  [default: all]",
)  # fmt: skip
def inspect(*, ops: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Compile the Triton kernels for each architecture; print registers, spills and traffic.

    Needs no GPU: Triton's compilers come with its package. For each kernel, each choice of tiles and each architecture:
    registers of a thread, bytes that it spills, shared memory (LDS) of a block, occupancy, matrix instructions, and the
    bytes of device memory moved over the least possible.

    Exits with 1 where a kernel spills without a stated reason, where a memory-bound kernel moves more than 1.1 times
    the least, or where a compute-bound kernel has no matrix instruction.
    """
    for kind, given, known in (("operation", ops, OPERATIONS), ("architecture", names, architectures())):
        for name in given:
            if name not in known:
                raise UnknownNameError(kind, name, known=known)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise InputError("kernels cannot be compiled under TRITON_INTERPRET", hint="unset TRITON_INTERPRET")
    inspected = load_with_torch("meshwright.kernels.inspection:inspected", what="inspecting kernels")
    rows: list[InspectedKernel] = inspected(ops, names)
    faults = [fault for row in rows for fault in row.faults]
    if not emitted_json({"kernels": [asdict(row) for row in rows], "faults": faults}):
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


command = verb_group(
    "kernels",
    about="""Training kernels: their facts by architecture, without a GPU.

`meshwright bench kernels` measures them on the device of this machine.""",
    verbs={"Kernels": [inspect]},
)
