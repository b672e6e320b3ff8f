"""`meshwright kernels`: a group of commands about training kernels."""

from __future__ import annotations

import click

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb, verb_group


@verb(
    "inspect",
    body="meshwright.cli.kernels_inspect:run",
    examples=[
        "meshwright kernels inspect --op rms_norm",
        "meshwright kernels inspect --op rotary --architecture sm90 --architecture gfx942 --json",
    ],
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="OPERATION",
    help="Only kernels of this operation. May be repeated.  [default: all]",
)
@click.option(
    "--architecture", "names", multiple=True, metavar="NAME",
    help="Only this architecture: sm90, sm100, gfx942, gfx950. May be repeated.  [default: all]",
)  # fmt: skip
@json_option
def inspect() -> None:
    """Compile the Triton kernels for each architecture; print registers, spills and traffic.

    Needs no GPU: Triton's compilers come with its package. For each kernel, each choice of tiles and each architecture:
    registers of a thread, bytes that it spills, shared memory (LDS) of a block, occupancy, matrix instructions, and the
    bytes of device memory moved over the least possible.

    Exits with 1 where a kernel spills without a stated reason, or where a memory-bound kernel moves more than 1.1 times
    the least.
    """


command = verb_group(
    "kernels",
    about="""Training kernels: their facts by architecture, without a GPU.

`meshwright bench kernels` measures them on the device of this machine.""",
    verbs={"Kernels": [inspect]},
    examples=["meshwright kernels inspect --op rotary --architecture sm90"],
)
