"""`meshwright inference`: a group of commands; each projects serving or offline inference."""

from __future__ import annotations

import click

from meshwright.api.inference import HARDWARE
from meshwright.cli.options import AmountRange, CountRange, file_option, json_option
from meshwright.cli.question import options_from
from meshwright.cli.verbs import verb, verb_group


@verb(
    "capacity",
    question="meshwright.api.inference:inference_capacity",
    body="meshwright.cli.inference:capacity",
    examples=[
        "meshwright inference capacity --model llama3.1-405b --cluster mi355x-1x1 --precision fp4 --context 8192",
        "meshwright inference capacity --model llama3.1-70b --cluster mi355x-1x1 --kv-precision bf16 --context 131072",
        "meshwright inference capacity --model deepseek-v3 --cluster h200-8x1 --precision fp8 --context 32768 --json",
    ],
)
@json_option
def capacity() -> None:
    """Compute the sessions and tokens that fit into memory.

    Counts weights with the scales of their format, the KV cache (grouped heads, latents, sliding windows), activations
    of one step and what an engine reserves. Without degrees, the layout that holds most tokens is found.

    Exits with 1 if not one session of this length fits.
    """


MAX_DRAFTED = 64
MS = AmountRange(1e9)
TTFT = click.option("--ttft", "ttft_ms", type=MS, metavar="MS", help="Longest time to first token, in ms.")
ITL = click.option("--itl", "itl_ms", type=MS, metavar="MS", help="Longest inter-token latency, in ms.")


@verb(
    "estimate",
    question="meshwright.api.inference:inference_estimate",
    without=("ttft_s", "itl_s"),
    body="meshwright.cli.inference:estimate",
    examples=[
        "meshwright inference estimate --model llama3.1-70b --cluster h200-8x1 --precision fp8 "
        "--tensor 2 --input-tokens 1024 --output-tokens 1024 --concurrency 1,16,64",
        "meshwright inference estimate --model llama3.1-405b --cluster mi355x-8x1 --precision fp4 "
        "--tensor 1 --input-tokens 2048 --output-tokens 2048",
        "meshwright inference estimate --model deepseek-v3 --cluster b200-8x1 --precision fp4 --engine sglang "
        "--input-tokens 8192 --output-tokens 1024 --rate 2 --ttft 2000 --percentile 99 --arrivals gamma:2",
        "meshwright inference estimate --model ./model --cluster cpu-1x1 --calibration llamacpp.json --lockstep "
        "--input-tokens 128 --output-tokens 64 --concurrency 1,8",
    ],
)
@options_from("meshwright.api.report:report_records", without=("items", "usd_per_device_hour"))
@click.option(
    "--drafted", type=CountRange(0, MAX_DRAFTED), default=0, metavar="N",
    help="Speculative decoding: drafted tokens per step.",
)  # fmt: skip
@click.option(
    "--draft", metavar="MODEL",
    help="Model that drafts, on the same devices.  [default: the model's own prediction module, if it has one]",
)  # fmt: skip
@click.option(
    "--accepted", type=AmountRange(MAX_DRAFTED), metavar="X", help="Drafted tokens accepted per step, on average.",
)  # fmt: skip
@TTFT
@ITL
@json_option
def estimate() -> None:
    """Estimate latencies, rates, memory and price of a server.

    \b
    TTFT   time to first token
    ITL    (end-to-end - TTFT) / (output tokens - 1): the mean over a request, also called TPOT
    total  prompt and output tokens per second

    Chunked prefill: prompts share the decode steps of other requests. Without degrees, one replica takes a whole node.

    With --rate, requests are simulated as they arrive: mean, p50, p95 and p99 of each latency, the share of requests
    within --ttft and --itl (goodput), and the highest rate that keeps these bounds.
    """


@verb(
    "plan",
    question="meshwright.api.inference:inference_plan",
    without=("ttft_s", "itl_s"),
    body="meshwright.cli.inference:plan",
    examples=[
        "meshwright inference plan --model llama3.1-70b --cluster b200-8x1 --precision fp4 --engine trtllm "
        "--input-tokens 8192 --output-tokens 1024 --itl 30 --ttft 2000 --explain",
        "meshwright inference plan --model deepseek-v3 --cluster mi355x-8x1 --precision fp4 --engine sglang "
        "--input-tokens 1024 --output-tokens 1024 --itl 30 --pareto",
        "meshwright inference plan --model llama3.1-70b --cluster mi300x-8x4 --precision fp8 "
        "--input-tokens 2048 --output-tokens 256 --rate 20 --itl 50 --region 'East US 2'",
    ],
)
@options_from("meshwright.api.report:report_records", without=("items", "usd_per_device_hour"))
@TTFT
@ITL
@click.option("--explain", is_flag=True, help="For each layout: its best load, and what stops it.")
@click.option("--pareto", is_flag=True, help="Print throughput per device against interactivity.")
@json_option
def plan() -> None:
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

    Costs every layout of the cluster at every load: tensor, expert and attention-data parallelism, replicas, pipeline
    stages over nodes. With --rate, the layout with fewest devices that serves it wins: the cheapest, and the one that
    needs least energy.

    Exits with 1 if no layout keeps the bounds.
    """


@verb(
    "calibrate",
    question="meshwright.api.inference:inference_calibrate",
    body="meshwright.cli.inference:calibrate",
    examples=[
        "meshwright inference calibrate bench-serve --cluster cpu-1x1 --out llamacpp.json",
        "meshwright inference calibrate a100/* --cluster a100-1x1 --model llama3.1-8b --precision bf16 --engine vllm",
    ],
)
@file_option("--out", help="Calibration file to write.  [default: ENGINE-ACCELERATOR.json]")
@json_option
def calibrate() -> None:
    """Fit the constants of one server to records of `meshwright bench serve`.

    RECORDS are folders of closed loops on one kind of server: other models, lengths and loads are predicted best from
    several of each. Equal loads of several folders are repeats. `estimate`, `plan` and `accuracy` read the file with
    --calibration.

    The error of each quantity is printed twice: fitted, and held out, where each model with its lengths is predicted
    from the others.
    """


GROUPS = ("source", "accelerator", "engine", "model", "precision", "metric", "evidence")


@verb(
    "accuracy",
    question="meshwright.api.inference:inference_accuracy",
    body="meshwright.cli.inference:accuracy",
    examples=[
        "meshwright inference accuracy --leave-one-source-out",
        "meshwright inference accuracy --by engine --rows",
        "meshwright inference accuracy --points mine.csv --json",
        "meshwright inference accuracy --records bench-serve-2 --calibration llamacpp.json --rows",
    ],
)
@options_from("meshwright.api.inference:inference_calibrate", without=("records", "cluster", *HARDWARE))
@click.option(
    "--by", type=click.Choice(GROUPS), default="source", show_default=True, help="Group the errors by this column.",
)  # fmt: skip
@click.option("--rows", "show_rows", is_flag=True, help="Also print every point.")
@json_option
def accuracy() -> None:
    """Predict published inference points and report the errors.

    Rates are tokens/s of all devices; latencies are seconds. Points that say too little are counted with the reason.

    The constants were fitted to the shipped points. --leave-one-source-out gives the error on sources that they have
    not seen. Records of a server of yours are points too: output tokens/s, mean TTFT and mean time per output token of
    every usable load.
    """


command = verb_group(
    "inference",
    about="""Project serving and offline inference: memory, rates, layouts, price.

Nothing is run, and no tensor framework is needed. `capacity` is arithmetic; the others state an interval.""",
    verbs={"What to project": [capacity, estimate, plan, calibrate, accuracy]},
    examples=[
        "meshwright inference capacity --model llama3.1-405b --cluster mi355x-1x1 --precision fp4",
        "meshwright inference accuracy --leave-one-source-out",
    ],
)
