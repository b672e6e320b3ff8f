"""`meshwright bench offline`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.bench_options import (
    request_timeout_option,
    seed_option,
    server_option,
    settings_option,
    start_timeout_option,
    tokenizer_option,
)
from meshwright.cli.options import count_option, file_option, folder_option, html_option, json_option
from meshwright.cli.verbs import verb


@verb(
    "offline",
    body="meshwright.cli.bench_offline:run",
    examples=[
        "meshwright bench offline --server llamacpp --model run.yaml --pairs 64/32,32/64 --requests 32",
        "meshwright bench offline --server vllm --model org/name --server-option tensor-parallel-size=8 --out tp8",
        "meshwright bench offline --engine transformers --model hf-folder --pairs 128/128 --html offline.html",
        "meshwright bench offline --engine vllm --model org/name --replicas 8 --devices 0-7 --against tp8/offline.json",
        "meshwright bench offline http://host:8000 http://host:8001 --extrapolate-to 8 --against tp8/offline.json",
    ],
)
@click.argument("addresses", metavar="[URL]...", nargs=-1)
@server_option(help="Start this server as often as --replicas says, and end all afterwards.")
@click.option(
    "--engine", type=click.Choice(["vllm", "llamacpp", "transformers"]),
    help="Call the batch interface of this engine instead of a server, as often as --replicas says.",
)  # fmt: skip
@click.option("--model", metavar="NAME", help="Model, as in `meshwright bench serve`.")
@count_option(
    "--replicas", high=64, default=1,
    help="Servers or engines to start; they are measured together.",
)  # fmt: skip
@click.option(
    "--devices", metavar="N,N-N,...",
    help="GPUs of all replicas, in equal parts: CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES of each.",
)  # fmt: skip
@click.option("--cores", metavar="N,N-N,...", help="Processor cores of all replicas, in equal parts.")
@settings_option(
    "--engine-option", "engine_options",
    help="Option of --engine: an argument of vllm.LLM, as in tensor-parallel-size=8; threads, parallel, context and "
    "dtype of llama.cpp; batch, dtype and threads of transformers.",
)  # fmt: skip
@settings_option("--server-option", "server_options", help="Option of the server's own command line.")
@start_timeout_option(server="each server")
@click.option(
    "--pairs", "pairs", metavar="I/O,I/O,...",
    help="Input and output tokens.  [default: the eleven pairs of the MI355X study, 128/128 to 20000/2000]",
)  # fmt: skip
@count_option(
    "--requests", "num_requests", high=10**6, default=64,
    help="Requests of each batch, over all replicas.",
)  # fmt: skip
@count_option(
    "--warmup", "num_warmup", low=0, high=10**6, default=1,
    help="Requests to each replica before each batch that do not count.",
)  # fmt: skip
@count_option(
    "--extrapolate-to", "extrapolate_to", high=10**6,
    help="Also give the rates of N replicas, marked as extrapolated with the factor.",
)  # fmt: skip
@file_option(
    "--against", "against",
    help="offline.json of another measurement: ratios by pair and their geometric mean.",
)  # fmt: skip
@tokenizer_option(help="tokenizer.json of the model, or its folder: exact input lengths.")
@request_timeout_option(default=3600.0)
@seed_option(of="the prompts")
@folder_option(
    "--out", "folder", default=Path("bench-offline"),
    help="Folder of offline.json and the servers' logs.",
)  # fmt: skip
@html_option
@json_option
def command() -> None:
    """Measure batch throughput of an engine or a server, or of several replicas together.

    Each batch is handed over at once, in equal shares to all replicas: through an engine's own batch interface
    (--engine), or through the OpenAI-compatible interface of a server. A batch that fails has the reason in its row.

    Replicas are measured, never multiplied: --extrapolate-to adds figures that carry the word and the
    factor. Compare replicas with tensor parallelism by two measurements and --against.

    Exits with 1 when no pair could be measured.
    """
