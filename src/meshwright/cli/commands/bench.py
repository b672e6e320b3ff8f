"""`meshwright bench`: a group of commands; each measures one kind of thing and keeps the records."""

from __future__ import annotations

from meshwright.cli.verbs import Verb, verb_group

SECTION = "What to measure"

command = verb_group(
    "bench",
    about="""Measure a device, training, serving or retrieval; keep the records.

Records say what was measured, on which device and with which software. `meshwright calibrate` turns those of a device
into a calibration for the planner.""",
    verbs={
        "device": Verb(
            target="meshwright.cli.commands.bench_device:command",
            section=SECTION,
            help="Measure GEMMs, attention, memory, training steps and collectives of this machine.",
        ),
        "kernels": Verb(
            target="meshwright.cli.commands.bench_kernels:command",
            section=SECTION,
            help="Time all routes of the training kernels on the shapes of models.",
        ),
        "train": Verb(
            target="meshwright.cli.commands.bench_train:command",
            section=SECTION,
            help="Measure training throughput over a sweep of configurations.",
        ),
        "serve": Verb(
            target="meshwright.cli.commands.bench_serve:command",
            section=SECTION,
            help="Measure online serving of an OpenAI-compatible server.",
        ),
        "offline": Verb(
            target="meshwright.cli.commands.bench_offline:command",
            section=SECTION,
            help="Measure batch throughput of an engine or a server, or of several replicas together.",
        ),
        "ingest": Verb(
            target="meshwright.cli.commands.bench_ingest:command",
            section=SECTION,
            help="Measure retrieval ingestion: documents to an index that answers queries.",
        ),
    },
    examples=[
        "meshwright bench device --budget 60s",
        "meshwright bench train run.yaml --sweep batch.micro=1,2",
        "meshwright bench serve http://localhost:8000 --concurrency 1,2,4",
    ],
)
