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
        "train": Verb(
            target="meshwright.cli.bench_train:command",
            section=SECTION,
            help="Training throughput: sweeps of run files, each beside its prediction.",
        ),
    },
    examples=[
        "meshwright bench device --budget 60s",
        "meshwright bench train run.yaml --sweep batch.micro=1,2",
    ],
)
