"""`meshwright inference plan`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.inference_options import (
    load_options,
    memory_ratio_option,
    model_options,
    number_option,
    price_options,
)
from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "plan",
    body="meshwright.cli.inference_plan:run",
    examples=[
        "meshwright inference plan --model llama3.1-70b --cluster b200-8x1 --precision fp4 --engine trtllm "
        "--input-tokens 8192 --output-tokens 1024 --itl 30 --ttft 2000 --explain",
        "meshwright inference plan --model deepseek-v3 --cluster mi355x-8x1 --precision fp4 --engine sglang "
        "--input-tokens 1024 --output-tokens 1024 --itl 30 --pareto",
        "meshwright inference plan --model llama3.1-70b --cluster mi300x-8x4 --precision fp8 "
        "--input-tokens 2048 --output-tokens 256 --rate 20 --itl 50 --region 'East US 2'",
    ],
)
@model_options
@load_options
@number_option("--ttft", "ttft_ms", "Longest time to first token, in ms.", metavar="MS")
@number_option("--itl", "itl_ms", "Longest inter-token latency, in ms.", metavar="MS")
@number_option(
    "--rate", "requests_per_s", "Requests per second to serve: the fewest devices that do.", metavar="N"
)
@click.option("--disaggregated", is_flag=True, help="Also try replicas that only prefill.")
@click.option("--explain", is_flag=True, help="For each layout: its best load, and what stops it.")
@click.option("--pareto", is_flag=True, help="Print throughput per device against interactivity.")
@memory_ratio_option
@price_options
@json_option
def command() -> None:
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

    Costs every layout of the cluster at every load: tensor, expert and attention-data parallelism, replicas, pipeline
    stages over nodes. With --rate, the layout with fewest devices that serves it wins: the cheapest, and the one that
    needs least energy.

    Exits with 1 if no layout keeps the bounds.
    """
