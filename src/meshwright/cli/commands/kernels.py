"""`meshwright kernels`: a group of commands about training kernels."""

from __future__ import annotations

from meshwright.cli.verbs import Verb, verb_group

command = verb_group(
    "kernels",
    about="""Training kernels: their facts by architecture, without a GPU.

`meshwright bench kernels` measures them on the device of this machine.""",
    verbs={
        "inspect": Verb(
            target="meshwright.cli.commands.kernels_inspect:command",
            section="Kernels",
            help="Compile the Triton kernels for each architecture; print registers, spills and traffic.",
        )
    },
    examples=["meshwright kernels inspect --op rotary --architecture sm90"],
)
