"""`meshwright inference estimate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.inference_options import (
    layout_options,
    load_options,
    memory_ratio_option,
    model_options,
    number_option,
    price_options,
)
from meshwright.cli.options import json_option, numbers
from meshwright.cli.verbs import verb

_concurrencies = numbers(low=1, high=10**7, example="1,4,16,64")


@verb(
    "estimate",
    body="meshwright.cli.inference_estimate:run",
    examples=[
        "meshwright inference estimate --model llama3.1-70b --cluster h200-8x1 --precision fp8 "
        "--tensor 2 --input-tokens 1024 --output-tokens 1024 --concurrency 1,16,64",
        "meshwright inference estimate --model llama3.1-405b --cluster mi355x-8x1 --precision fp4 "
        "--tensor 1 --input-tokens 2048 --output-tokens 2048",
        "meshwright inference estimate --model deepseek-v3 --cluster b200-8x1 --precision fp4 --engine sglang "
        "--input-tokens 8192 --output-tokens 1024 --rate 2 --json",
        "meshwright inference estimate --model ./model --cluster cpu-1x1 --calibration llamacpp.json --lockstep "
        "--input-tokens 128 --output-tokens 64 --concurrency 1,8",
    ],
)
@model_options
@load_options
@click.option(
    "--concurrency", callback=_concurrencies, metavar="N,N,...",
    help="Requests in flight on the whole cluster (closed loop).  [default: as many as fit]",
)  # fmt: skip
@number_option("--rate", "requests_per_s", "Arriving requests per second (open loop).", metavar="N")
@layout_options
@click.option(
    "--prefill-replicas", type=click.IntRange(0, 10**7), default=0, metavar="N",
    help="Replicas that only prefill and send the cache to the others.",
)  # fmt: skip
@click.option(
    "--drafted", type=click.IntRange(0, 64), default=0, metavar="N",
    help="Speculative decoding: drafted tokens per step.",
)  # fmt: skip
@click.option(
    "--draft", metavar="MODEL",
    help="Model that drafts, on the same devices.  [default: the model's own prediction module, if it has one]",
)  # fmt: skip
@number_option(
    "--accepted", "accepted", "Drafted tokens accepted per step, on average.", most=64, metavar="X"
)
@click.option(
    "--lockstep", is_flag=True,
    help="Requests of equal lengths begin together and stay in step, as closed loops with fixed lengths do.",
)  # fmt: skip
@memory_ratio_option
@price_options
@json_option
def command() -> None:
    """Estimate latencies, rates, memory and price of a server.

    \b
    TTFT   time to first token
    ITL    (end-to-end - TTFT) / (output tokens - 1): the mean over a request, also called TPOT
    total  prompt and output tokens per second

    Chunked prefill: prompts share the decode steps of other requests. Without degrees, one replica takes a whole node.
    """
