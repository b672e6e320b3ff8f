"""`meshwright bench offline`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "offline",
    body="meshwright.cli.bench_offline:run",
    examples=[
        "meshwright bench offline --server llamacpp --model run.yaml --pairs 64/32,32/64 --requests 32",
        "meshwright bench offline --server vllm --model org/name --server-option tensor-parallel-size=8 --out tp8",
        "meshwright bench offline http://host:8000 http://host:8001 --extrapolate-to 8 --against tp8/offline.json",
    ],
)
@click.argument("addresses", metavar="[URL]...", nargs=-1)
@click.option(
    "--server", type=click.Choice(["llamacpp", "vllm", "sglang", "mock"]),
    help="Start this server as often as --replicas says, and end all afterwards.",
)  # fmt: skip
@click.option("--model", metavar="NAME", help="As of `meshwright bench serve`.")
@click.option(
    "--replicas", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
    help="Servers to start; they are measured together.",
)  # fmt: skip
@click.option(
    "--server-option", "server_options", multiple=True, metavar="KEY=VALUE",
    help="Option of the server's own command line. May be repeated.",
)  # fmt: skip
@click.option(
    "--start-timeout", "start_timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True,
    metavar="SECONDS", help="Time in which each server must answer.",
)  # fmt: skip
@click.option(
    "--pairs", "pairs", metavar="I/O,I/O,...",
    help="Input and output tokens.  [default: the eleven pairs of the MI355X study, 128/128 to 20000/2000]",
)  # fmt: skip
@click.option(
    "--requests", "num_requests", type=click.IntRange(1, 10**6), default=64, show_default=True, metavar="N",
    help="Requests of each batch, over all replicas.",
)  # fmt: skip
@click.option(
    "--warmup", "num_warmup", type=click.IntRange(0, 10**6), default=1, show_default=True, metavar="N",
    help="Requests to each replica before each batch that do not count.",
)  # fmt: skip
@click.option(
    "--extrapolate-to", "extrapolate_to", type=click.IntRange(1, 10**6), metavar="N",
    help="Also give the rates of N replicas, marked as extrapolated with the factor.",
)  # fmt: skip
@click.option(
    "--against", "against", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="offline.json of another measurement: ratios by pair and their geometric mean.",
)  # fmt: skip
@click.option(
    "--tokenizer", "tokenizer_path", type=click.Path(path_type=Path), metavar="PATH",
    help="tokenizer.json of the model, or its folder: exact input lengths.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=3600.0, show_default=True, metavar="SECONDS",
    help="Time after which one request is given up.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of the prompts."
)
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path("bench-offline"),
    show_default=True, metavar="DIR", help="Folder of offline.json and the servers' logs.",
)  # fmt: skip
@json_option
def command() -> None:
    """Measure batch throughput of a server, or of several replicas together.

    Each batch is handed over at once, in equal shares to all replicas, through the server's OpenAI-compatible
    interface. Replicas are measured, never multiplied: --extrapolate-to adds figures that carry the word and the
    factor. Compare replicas with tensor parallelism by two measurements and --against.

    Exits with 1 when no pair could be measured.
    """
