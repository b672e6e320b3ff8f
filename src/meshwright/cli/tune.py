"""`meshwright tune`: a group; each of its commands tunes one thing and changes nothing unless told to."""

from __future__ import annotations

from meshwright.cli.main import Verb, verb_group

SECTION = "What to tune"

command = verb_group(
    "tune",
    about="Make this node, and a run on it, ready for training. Nothing changes without --apply.",
    verbs={
        "system": Verb(
            target="meshwright.cli.tune_system:command",
            section=SECTION,
            help="Settings of the kernel: clocks, sleep states, memory, network.",
        ),
        "dataloader": Verb(
            target="meshwright.cli.tune_dataloader:command",
            section=SECTION,
            help="How many threads read a run's data, for training and for validation.",
        ),
        "gemm": Verb(
            target="meshwright.cli.tune_gemm:command",
            section=SECTION,
            help="How a run's matrix products are made: kernels, libraries, threads.",
        ),
    },
    examples=["meshwright tune system", "meshwright tune dataloader run.yaml --apply"],
)
