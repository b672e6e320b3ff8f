"""`meshwright inference estimate`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import AmountRange, CountRange, json_option
from meshwright.cli.question import options_from
from meshwright.cli.verbs import verb

MAX_DRAFTED = 64


@verb(
    "estimate",
    question="meshwright.api.inference:inference_estimate",
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
@json_option
def command() -> None:
    """Estimate latencies, rates, memory and price of a server.

    \b
    TTFT   time to first token
    ITL    (end-to-end - TTFT) / (output tokens - 1): the mean over a request, also called TPOT
    total  prompt and output tokens per second

    Chunked prefill: prompts share the decode steps of other requests. Without degrees, one replica takes a whole node.
    """
