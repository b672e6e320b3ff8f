"""`meshwright tune`: a group of commands; each tunes one thing, and changes nothing without --apply or --write."""

from __future__ import annotations

from meshwright.cli.verbs import Verb, verb_group

SECTION = "What to tune"

command = verb_group(
    "tune",
    about="""Tune this node, or a run on it. Nothing changes without --apply or --write.

Each command measures or checks first, prints what it would change, and changes it only if asked to.""",
    verbs={
        "system": Verb(
            target="meshwright.cli.commands.tune_system:command",
            section=SECTION,
            help="Show, change or restore kernel settings that affect training.",
        ),
        "dataloader": Verb(
            target="meshwright.cli.commands.tune_dataloader:command",
            section=SECTION,
            help="Find the number of data loading threads for training and validation.",
        ),
        "gemm": Verb(
            target="meshwright.cli.commands.tune_gemm:command",
            section=SECTION,
            help="Find the fastest GEMM kernels, library and threads for a run.",
        ),
        "learning-rate": Verb(
            target="meshwright.cli.commands.tune_learning_rate:command",
            section=SECTION,
            help="Find a learning rate for a run by a range test.",
        ),
    },
    examples=["meshwright tune system", "meshwright tune dataloader run.yaml --apply"],
)
