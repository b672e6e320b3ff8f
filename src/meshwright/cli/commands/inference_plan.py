"""`meshwright inference plan`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import AmountRange, json_option
from meshwright.cli.question import options_from
from meshwright.cli.verbs import verb

MS = AmountRange(1e9)


@verb(
    "plan",
    question="meshwright.api.inference:inference_plan",
    without=("ttft_s", "itl_s"),
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
@options_from("meshwright.api.report:report_records", without=("items", "usd_per_device_hour"))
@click.option("--ttft", "ttft_ms", type=MS, metavar="MS", help="Longest time to first token, in ms.")
@click.option("--itl", "itl_ms", type=MS, metavar="MS", help="Longest inter-token latency, in ms.")
@click.option("--explain", is_flag=True, help="For each layout: its best load, and what stops it.")
@click.option("--pareto", is_flag=True, help="Print throughput per device against interactivity.")
@json_option
def command() -> None:
    """Find the serving layout with most tokens/s under bounds of TTFT and ITL.

    Costs every layout of the cluster at every load: tensor, expert and attention-data parallelism, replicas, pipeline
    stages over nodes. With --rate, the layout with fewest devices that serves it wins: the cheapest, and the one that
    needs least energy.

    Exits with 1 if no layout keeps the bounds.
    """
