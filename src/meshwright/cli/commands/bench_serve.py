"""`meshwright bench serve`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.bench_options import (
    repeats_option,
    request_timeout_option,
    seed_option,
    server_option,
    settings_option,
    start_timeout_option,
    tokenizer_option,
)
from meshwright.cli.options import (
    Decorator,
    count_option,
    file_option,
    folder_option,
    html_option,
    json_option,
    numbers,
    seconds_option,
)
from meshwright.cli.verbs import verb

MOST_IN_FLIGHT = 10_000


def _bound(name: str, destination: str, text: str) -> Decorator:
    return click.option(name, destination, type=click.FloatRange(min=0.001), metavar="MS", help=text)


@verb(
    "serve",
    body="meshwright.cli.bench_serve:run",
    examples=[
        "meshwright bench serve http://localhost:8000 --concurrency 1,2,4,8,16,32,64 --html serving.html",
        "meshwright bench serve --url http://localhost:8000 --model llama --concurrency 8 --requests 200 "
        "--input-tokens 1024 --output-tokens 128 --json",
        "meshwright bench serve localhost:8000 --rate 2,4,8 --arrivals gamma --shape 0.5 --requests 500",
        "meshwright bench serve localhost:8000 --prompts prompts.jsonl --repeats 6 --ttft-bound 500 --itl-bound 30",
        "meshwright bench serve --server llamacpp --model run.yaml --concurrency 1,2,4 --output-tokens 32",
        "meshwright bench serve --server vllm --model org/name --server-option tensor-parallel-size=8",
        "meshwright bench serve --from vllm.json --from profile_export_aiperf.json",
        "meshwright bench serve localhost:8000 --search --itl-bound 30 --max-concurrency 256",
    ],
)
@click.argument("address", metavar="[URL]", required=False)
@click.option("--url", metavar="URL", help="Address of an OpenAI-compatible server, with or without /v1.")
@server_option(help="Start this server, and end it afterwards.")
@click.option(
    "--model", metavar="NAME",
    help="Model to ask for (default: the server's only one), or the one that --server loads: a Hugging Face folder, "
    "RUN.yaml, a checkpoint, FILE.gguf.",
)  # fmt: skip
@settings_option(
    "--server-option", "server_options",
    help="Option of the server's own command line, as in tensor-parallel-size=4.",
)  # fmt: skip
@start_timeout_option(server="the server")
@click.option(
    "--device", metavar="ACCELERATOR-N",
    help="Devices of the server, as in h200-8 or h200-8x2: the record names them, and its tokens have a price.  "
    "[default: with --server, those of this node]",
)  # fmt: skip
@click.option(
    "--endpoint", "interface", type=click.Choice(["completions", "chat"]), default="completions", show_default=True,
    help="Interface: /v1/completions or /v1/chat/completions.",
)  # fmt: skip
@click.option(
    "--concurrency", metavar="N,N,...",
    callback=numbers(low=1, high=MOST_IN_FLIGHT, example="1,2,4"),
    help="Closed loop: requests in flight, one load each.  [default: 1,2,4,8,16,32,64]",
)  # fmt: skip
@click.option("--rate", "rates", metavar="R,R,...", help="Open loop: requests per second, one load each.")
@click.option(
    "--arrivals", type=click.Choice(["poisson", "gamma", "constant", "trace"]),
    help="Arrivals of an open loop; trace: at the times in --prompts.  [default: poisson]",
)  # fmt: skip
@click.option(
    "--shape", type=click.FloatRange(min=0.01, max=1000), metavar="K",
    help="Shape of gamma arrivals: 1 is Poisson, below 1 burstier.  [default: 0.5]",
)  # fmt: skip
@count_option(
    "--max-concurrency", "most_in_flight", high=MOST_IN_FLIGHT,
    help="Most requests in flight of an open loop (default: no limit) or of --search (default: 64).",
)  # fmt: skip
@count_option(
    "--requests", "num_requests", high=10**6,
    help="Requests of each load.  [default: 10 for each in flight, at least 32; the lines of a trace]",
)  # fmt: skip
@seconds_option("--duration", "duration_s", low=0.1, help="Send no further request after this time.")
@count_option(
    "--warmup", "num_warmup", low=0, high=10**6,
    help="Requests before each load that do not count.  [default: as many as are in flight]",
)  # fmt: skip
@seconds_option("--ramp", "ramp_s", default=0.0, help="Time over which a closed loop reaches its concurrency.")
@repeats_option(of="each load; loads take turns")
@click.option(
    "--input-tokens", "inputs", default="128", show_default=True, metavar="LENGTH",
    help="Tokens of a prompt: 128, 64-256, normal:MEAN,SD or lognormal:MEDIAN,SIGMA.",
)  # fmt: skip
@click.option(
    "--output-tokens",
    "outputs",
    default="128",
    show_default=True,
    metavar="LENGTH",
    help="Tokens of an answer, likewise.",
)
@file_option(
    "--prompts", "prompts_path", metavar="FILE.jsonl",
    help="Prompts or lengths, with times for a trace; one JSON mapping a line.",
)  # fmt: skip
@tokenizer_option(
    help="tokenizer.json of the model, or its folder: exact input lengths, and counts where the server gives none.",
)  # fmt: skip
@click.option("--stop-at-end-token", is_flag=True, help="Let answers end early instead of sending ignore_eos.")
@click.option(
    "--extra", "extras", multiple=True, metavar="KEY=JSON", help="Further key of each request's body. May be repeated."
)
@click.option("--key-variable", metavar="NAME", help="Environment variable that holds the server's API key.")
@_bound("--ttft-bound", "ttft_ms", "Bound of goodput: first token.")
@_bound(
    "--itl-bound", "itl_ms",
    "Bound of goodput and of the best load: inter-token latency.  [default of the best load: 30]",
)  # fmt: skip
@_bound("--e2e-bound", "e2e_ms", "Bound of goodput: whole answer.")
@click.option(
    "--itl-definition", type=click.Choice(["tpot", "chunk-gap"]), default="tpot", show_default=True,
    help="Inter-token latency of the best load: per request, or over all gaps between chunks.",
)  # fmt: skip
@click.option(
    "--search",
    is_flag=True,
    help="Search the highest concurrency whose medians are under --itl-bound and --ttft-bound.",
)
@request_timeout_option(default=600.0)
@seconds_option(
    "--idle-timeout",
    "idle_timeout_s",
    low=0.1,
    default=120.0,
    help="Time without a byte from the server after which one request is given up.",
)
@seed_option(of="prompts, lengths and arrivals")
@click.option("--no-self-test", is_flag=True, help="Do not measure the client's own ceiling.")
@folder_option(
    "--out", "folder",
    help="Folder of the records.  [default: bench-serve, or the first free bench-serve-N]",
)  # fmt: skip
@click.option(
    "--resume", is_flag=True,
    help="Go on with the interrupted measurement in --out; loads that were measured to their end are kept.",
)  # fmt: skip
@click.option(
    "--client", type=click.Choice(["meshwright", "aiperf"]), default="meshwright", show_default=True,
    help="Client that sends the requests; aiperf has an environment of its own.",
)  # fmt: skip
@file_option(
    "--from", "results", multiple=True,
    help="Read results of vllm bench serve, sglang.bench_serving, AIPerf, guidellm or InferenceX instead of measuring. "
    "May be repeated.",
)  # fmt: skip
@html_option
@json_option
def command() -> None:
    """Measure online serving of an OpenAI-compatible server.

    Streams answers under each load and reports tokens per second and latencies. Input, output and total tokens are
    kept apart, and so are two definitions of inter-token latency: time per output token of a request, and gaps
    between chunks. Failed requests are counted by kind, and their tokens do not count.

    Each load and request is recorded when it ends, and Ctrl-C keeps what was measured. Before and after, the client
    measures its own ceiling, and results above half of it are refused. Exits with 1 when no load could be measured.
    """
