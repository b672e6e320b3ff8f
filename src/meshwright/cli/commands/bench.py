"""`meshwright bench`: a group of commands; each measures one kind of thing and keeps the records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.api.bench import bench_device, device_request
from meshwright.api.question import question_of
from meshwright.catalog import lookup as catalog
from meshwright.cli import options
from meshwright.cli.output import Align, emitted_json, load_with_torch, note, print_line, print_table, progress
from meshwright.cli.verbs import verb, verb_group
from meshwright.errors import InputError, UnknownNameError
from meshwright.kernels.operations import OPERATIONS
from meshwright.targets import load

if TYPE_CHECKING:
    from meshwright.bench.device import DeviceOutcome  # imports PyTorch
    from meshwright.records.device import DeviceRecorder


def server_option(*, help: str) -> options.Decorator:
    """--server: a server that the command starts."""
    return click.option("--server", type=click.Choice(["llamacpp", "vllm", "sglang", "mock"]), help=help)


def settings_option(name: str, destination: str, *, help: str) -> options.Decorator:
    """KEY=VALUE of the program that is measured."""
    about = f"{help} May be repeated."
    return click.option(name, destination, multiple=True, metavar="KEY=VALUE", help=about)


def tokenizer_option(*, help: str) -> options.Decorator:
    """--tokenizer: tokenizer.json, or its folder."""
    kind = options.PathType()
    return click.option("--tokenizer", "tokenizer_path", type=kind, metavar="PATH", help=help)


@verb("bench device", question="meshwright.api.bench:bench_device")
def device(*, asked: dict[str, Any]) -> None:
    """Measure GEMMs, attention, memory, training steps and collectives of this machine.

    Measures the shapes of a model and its plan first, in the number formats of the run, then a grid of shapes. Each
    measurement is repeated until its median is known to 3 %, or until its part of the time budget is used. Every
    result is written at once: Ctrl-C keeps the finished ones, and --resume continues.

    `meshwright calibrate DIR` turns the records into a calibration for the planner.
    """
    given = question_of(bench_device).checked(asked)
    with progress("starting PyTorch"):
        request, device, recorder = device_request(**given, command=("meshwright", *sys.argv[1:]))
        measure = load("meshwright.bench.device:measure_device")
    try:
        with progress(f"measuring {recorder.sidecar['device']['name']}", total=request.budget_s) as advance:
            outcome = measure(request, device=device, recorder=recorder, advance=advance)
    except KeyboardInterrupt:
        note(f"{recorder.path} has {len(recorder.done)} of the measurements; continue with --resume")
        raise
    if not emitted_json(_device_document(recorder, outcome)):
        _show_device(recorder, outcome)


def _device_document(recorder: DeviceRecorder, outcome: DeviceOutcome) -> dict[str, Any]:
    return {
        "records": recorder.path,
        "device": recorder.sidecar["device"],
        "families": {family.value: counts for family, counts in outcome.counts.items()},
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _show_device(recorder: DeviceRecorder, outcome: DeviceOutcome) -> None:
    print_line(recorder.sidecar["device"]["name"], style="bold")
    print_table(
        {"family": "left", "known to 3 %": "right", "less well": "right", "failed": "right"},
        [(family.value, *counts.values()) for family, counts in outcome.counts.items()],
    )
    print_line(f"Measured in {outcome.seconds:.0f} s; the records are in {recorder.path}.")
    note(*outcome.notes)


FORMATS = ("bf16", "fp32")


@verb("bench kernels")
@click.option("--ops", metavar="OP,OP,...", help="Operations to time.  [default: all that the device computes]")
@click.option(
    "--models", default="llama3.1-8b", show_default=True, metavar="MODEL,MODEL,...",
    help="Catalogue models whose shapes are timed.",
)  # fmt: skip
@options.count_option("--tokens", help="Tokens of the one sequence.  [default: 8192; 256 on a CPU]")
@click.option(
    "--formats", metavar="F,F", help="Number formats, of bf16 and fp32.  [default: bf16; fp32 on a CPU]"
)  # fmt: skip
@click.option(
    "--compile/--no-compile", "compiles", default=None, help="Time torch.compile too.  [default: on a GPU]"
)  # fmt: skip
@options.budget_option(default="120s", help="Time to measure, split over all routes of all calls: 90s, 3m, 1h.")
@options.folder_option(
    "--out", "folder", default=Path("bench-kernels"),
    help="Folder of kernels.json, tuned.json, records.csv and records.json.",
)  # fmt: skip
def kernels(*, ops: str | None, models: str, formats: str | None, **asked: Any) -> None:
    """Time all routes of the training kernels on the shapes of models.

    Each route of an operation runs on the same call, forward and backward: PyTorch eager (`reference`),
    `torch.compile`, our Triton kernels, and libraries where they are installed. Printed are time, share of the
    roofline, peak memory, and error against float64. A route that cannot serve a call says why.

    The folder has all rows (kernels.json), the fastest route of each call for a run's `kernels.tuned` (tuned.json),
    and what those take as records for `meshwright calibrate` (records.csv).
    """
    chosen = None if ops is None else _names(ops, "--ops", OPERATIONS)
    named = [catalog.model(name) for name in _names(models, "--models", None)]
    wanted = None if formats is None else _names(formats, "--formats", FORMATS)
    measure = load_with_torch("meshwright.cli.bench_kernels_torch:measure", what="measuring kernels")
    found: dict[str, Any] = measure(chosen, named, formats=wanted, **asked)
    if emitted_json({name: value for name, value in found.items() if name != "table"}):
        return
    print_line(found["device"]["name"], style="bold")
    columns: dict[str, Align] = {"call": "left", "route": "left"}
    columns |= dict.fromkeys(("forward ms", "backward ms", "of roofline", "peak memory", "error"), "right")
    columns["remark"] = "left"
    print_table(columns, found["table"])
    print_line(f"All rows, the tuned table and the records are in {found['folder']}.")
    note(*found["notes"])


def _names(text: str, option: str, known: Any) -> Sequence[str]:
    names = options.names_in(text)
    if not names:
        raise InputError(f"{option} names none", allowed=None if known is None else ", ".join(known))
    for name in names:
        if known is not None and name not in known:
            raise UnknownNameError(f"{option}: name", name, known=known)
    return names


@verb("bench train", question="meshwright.api.bench:bench_train", body="meshwright.cli.bench_train:run")
@options.html_option
def train() -> None:
    """Measure training throughput over a sweep of configurations.

    Trains every combination of run files and swept keys several times, and compares it with its prediction. Only
    steps are run: no checkpoints, validation, trackers or samples. Configurations take turns, so that a drift of the
    machine affects all of them alike.

    Every result is written at once: Ctrl-C keeps finished results, and --resume continues. A training that runs out
    of memory, is refused or is killed is a row with its reason. Exits with 1 when no configuration could be trained.
    """


MOST_IN_FLIGHT = 10_000


def _bound(name: str, destination: str, text: str) -> options.Decorator:
    return click.option(name, destination, type=click.FloatRange(min=0.001), metavar="MS", help=text)


@verb("bench serve", body="meshwright.cli.bench_serve:run")
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
@options.seconds_option(
    "--start-timeout", "start_timeout_s", low=1, default=600.0, help="Time in which the server must answer."
)
@click.option(
    "--device", metavar="ACCELERATOR-N",
    help="Devices of the server, as in h200-8 or h200-8x2: the record names them, and its tokens have a price.  "
    "[default: with --server, this node's]",
)  # fmt: skip
@click.option(
    "--endpoint", "interface", type=click.Choice(["completions", "chat"]), default="completions", show_default=True,
    help="Interface: /v1/completions or /v1/chat/completions.",
)  # fmt: skip
@click.option(
    "--concurrency", metavar="N,N,...",
    callback=options.numbers(low=1, high=MOST_IN_FLIGHT, example="1,2,4"),
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
@options.count_option(
    "--max-concurrency", "most_in_flight", high=MOST_IN_FLIGHT,
    help="Most requests in flight of an open loop (default: no limit) or of --search (default: 64).",
)  # fmt: skip
@options.count_option(
    "--requests", "num_requests", high=10**6,
    help="Requests of each load.  [default: 10 for each in flight, at least 32; the lines of a trace]",
)  # fmt: skip
@options.seconds_option("--duration", "duration_s", low=0.1, help="Send no further request after this time.")
@options.count_option(
    "--warmup", "num_warmup", low=0, high=10**6,
    help="Requests before each load that do not count.  [default: the number in flight]",
)  # fmt: skip
@options.seconds_option("--ramp", "ramp_s", default=0.0, help="Time over which a closed loop reaches its concurrency.")
@options.count_option(
    "--repeats", high=1000, default=1,
    help="Measurements of each load; loads take turns. Six or more have a 95 % interval.",
)  # fmt: skip
@click.option(
    "--input-tokens", "inputs", default="128", show_default=True, metavar="LENGTH",
    help="Tokens of a prompt: 128, 64-256, normal:MEAN,SD or lognormal:MEDIAN,SIGMA.",
)  # fmt: skip
@click.option(
    "--output-tokens", "outputs", default="128", show_default=True, metavar="LENGTH",
    help="Tokens of an answer, likewise.",
)  # fmt: skip
@options.file_option(
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
@settings_option(
    "--request-field", "renamed",
    help="Other name of a request's field (max_tokens, temperature, stream_options, ignore_eos), as in "
    "max_tokens=max_completion_tokens.",
)  # fmt: skip
@click.option(
    "--omit-field", "omitted", multiple=True, metavar="NAME",
    help="Leave this field out of each request, one of the same. May be repeated.",
)  # fmt: skip
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
    "--search", is_flag=True,
    help="Search the highest concurrency whose medians are under --itl-bound and --ttft-bound.",
)  # fmt: skip
@options.seconds_option(
    "--timeout", "timeout_s", low=0.1, default=600.0, help="Time after which one request is given up."
)
@options.seconds_option(
    "--idle-timeout", "idle_timeout_s", low=0.1, default=120.0,
    help="Time without a byte from the server after which one request is given up.",
)  # fmt: skip
@options.count_option(
    "--retries", "num_retries", low=0, high=100, default=0,
    help="Send a request again up to N times after HTTP 429 or 503: when Retry-After says, or after 1, 2, 4 ... s.",
)  # fmt: skip
@options.count_option("--seed", low=0, default=0, help="Seed of prompts, lengths and arrivals.")
@click.option("--no-self-test", is_flag=True, help="Do not measure the client's own ceiling.")
@options.folder_option(
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
@options.file_option(
    "--from", "results", multiple=True,
    help="Read results of vllm bench serve, sglang.bench_serving, AIPerf, guidellm or InferenceX instead of measuring. "
    "May be repeated.",
)  # fmt: skip
@options.html_option
def serve() -> None:
    """Measure online serving of an OpenAI-compatible server.

    Streams answers under each load and reports tokens per second and latencies. Input, output and total tokens are
    kept apart, and so are two definitions of inter-token latency: time per output token of a request, and gaps
    between chunks. Failed requests are counted by kind, and their tokens do not count.

    Each load and request is recorded when it ends, and Ctrl-C keeps the records. Before and after, the client
    measures its own ceiling, and results above half of it are refused. Exits with 1 when no load could be measured.
    """


@verb("bench offline", body="meshwright.cli.bench_offline:run")
@click.argument("addresses", metavar="[URL]...", nargs=-1)
@server_option(help="Start --replicas of this server, and end all afterwards.")
@click.option(
    "--engine", type=click.Choice(["vllm", "llamacpp", "transformers"]),
    help="Call the batch interface of this engine instead of a server, in --replicas processes.",
)  # fmt: skip
@click.option("--model", metavar="NAME", help="Model, as in `meshwright bench serve`.")
@options.count_option(
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
@options.seconds_option(
    "--start-timeout", "start_timeout_s", low=1, default=600.0, help="Time in which each server must answer."
)
@click.option(
    "--pairs", "pairs", metavar="I/O,I/O,...",
    help="Input and output tokens.  [default: the eleven pairs of the MI355X study, 128/128 to 20000/2000]",
)  # fmt: skip
@options.count_option(
    "--requests", "num_requests", high=10**6, default=64,
    help="Requests of each batch, over all replicas.",
)  # fmt: skip
@options.count_option(
    "--warmup", "num_warmup", low=0, high=10**6, default=1,
    help="Requests to each replica before each batch that do not count.",
)  # fmt: skip
@options.count_option(
    "--extrapolate-to", "extrapolate_to", high=10**6,
    help="Also give the rates of N replicas, marked as extrapolated with the factor.",
)  # fmt: skip
@options.file_option(
    "--against", "against",
    help="offline.json of another measurement: ratios by pair and their geometric mean.",
)  # fmt: skip
@tokenizer_option(help="tokenizer.json of the model, or its folder: exact input lengths.")
@options.seconds_option(
    "--timeout", "timeout_s", low=0.1, default=3600.0, help="Time after which one request is given up."
)
@options.count_option("--seed", low=0, default=0, help="Seed of the prompts.")
@options.folder_option(
    "--out", "folder", default=Path("bench-offline"),
    help="Folder of offline.json and the servers' logs.",
)  # fmt: skip
@options.html_option
def offline() -> None:
    """Measure batch throughput of an engine or a server, or of several replicas together.

    Each batch is handed over at once, in equal shares to all replicas: through an engine's own batch interface
    (--engine), or through the OpenAI-compatible interface of a server. A batch that fails has the reason in its row.

    Replicas are measured, never multiplied: --extrapolate-to adds figures that carry the word and the
    factor. Compare replicas with tensor parallelism by two measurements and --against.

    Exits with 1 when no pair could be measured.
    """


@verb("bench ingest", question="meshwright.api.bench_ingest:bench_ingest", body="meshwright.cli.bench_ingest:run")
@options.html_option
def ingest() -> None:
    """Measure retrieval ingestion: documents to an index that answers queries.

    Reads text, splits it into chunks by tokens, encodes them with a sentence encoder, builds an index and searches
    it. Reports rates of each stage, stages one at a time against overlapped, the time until chunks can be searched,
    recall against the exact index, latency and rate of searches, and memory.

    SOURCE is a folder, a JSONL file or a text file; without it, the source of Python's standard library is read. Each
    measurement is recorded when it ends, and Ctrl-C keeps the records. Exits with 1 without any measurement.
    """


command = verb_group(
    "bench",
    about="""Measure a device, training, serving or retrieval; keep the records.

A record has the measurement, its device and its software. `meshwright calibrate` turns the records of a
device into a calibration for the planner.""",
    verbs={"What to measure": [device, kernels, train, serve, offline, ingest]},
)
