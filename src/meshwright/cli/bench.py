"""`meshwright bench`: a group; each of its commands measures one kind of thing and keeps the records."""

from __future__ import annotations

from meshwright.cli.main import Verb, verb_group

SECTION = "What to measure"

command = verb_group(
    "bench",
    about="Measure, and keep the records.",
    verbs={
        "device": Verb(
            target="meshwright.cli.bench_device:command",
            section=SECTION,
            help="Matrix products, attention, memory, optimizer, collectives.",
        ),
    },
    examples=["meshwright bench device --budget 60s"],
)
