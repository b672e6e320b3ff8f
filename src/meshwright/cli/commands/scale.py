"""`meshwright scale`: options and help."""

from __future__ import annotations

from typing import Any

import click

from meshwright.cli.options import (
    AmountType,
    calibration_option,
    count_option,
    description_options,
    fix_option,
    html_option,
    json_option,
    numbers,
    run_argument,
    set_option,
)
from meshwright.cli.verbs import verb
from meshwright.errors import InputError

MAX_DEVICES = 10**7
MAX_NUMBER = 1e18

_counts = numbers(low=1, high=MAX_DEVICES, example="768,1024")


def _finite(ctx: click.Context, param: click.Parameter, number: float | None) -> float | None:
    if number is not None and not 0 < number <= MAX_NUMBER:
        raise InputError(f"{param.opts[0]} is out of range", got=number, allowed=f"above 0, to {MAX_NUMBER:g}")
    return number


def _positive(name: str, destination: str, metavar: str, text: str) -> Any:
    return click.option(name, destination, type=AmountType(), callback=_finite, metavar=metavar, help=text)


@verb(
    "scale",
    body="meshwright.cli.scale:run",
    examples=[
        "meshwright scale examples/runs/moe-2t-mi355x.yaml --devices 8192,98304 --days 22.8",
        "meshwright scale examples/runs/moe-2t-mi300x.yaml --emulate 768 --devices 16384,32768,65536",
        "meshwright scale examples/runs/llama3.1-8b-pretrain.yaml --mode weak --html scale.html",
        "meshwright scale --model moe-2t --cluster mi355x-8x1024 --gbs 32768 --seq 4096 --json",
    ],
)
@run_argument(required=False)
@description_options
@set_option
@calibration_option
@fix_option
@click.option(
    "--devices", "sizes", callback=_counts, metavar="N,N,...",
    help="Numbers of devices; the smallest is the base of the efficiency.  [default: 1 to 16 times the cluster]",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(("strong", "weak")), default="strong", show_default=True,
    help="Strong scaling keeps the global batch; weak scaling grows it with the devices.",
)  # fmt: skip
@click.option("--keep-plan", is_flag=True, help="Keep one plan, and change only its data-parallel degree.")
@count_option(
    "--emulate", "small", high=MAX_DEVICES,
    help="Emulate each size on N devices with a smaller batch, and show the error of the emulation.",
)  # fmt: skip
@click.option(
    "--replicas", callback=_counts, metavar="N,N,...",
    help="At the largest size, rank these numbers of devices per model replica.",
)  # fmt: skip
@click.option("--sensitivity", "with_sensitivity", is_flag=True, help="Also vary one assumption at a time.")
@_positive("--tokens", "num_tokens", "N", "Tokens to train on.  [default: the run file's]")
@_positive("--days", "days", "DAYS", "Instead of --tokens: as many tokens as the first size trains on in DAYS.")
@click.option(
    "--goodput/--no-goodput", "with_failures", default=True, show_default=True,
    help="Include the time that failures cost.",
)  # fmt: skip
@html_option
@json_option
def command() -> None:
    """Scale a run to more devices: efficiency, time, failures, energy, cost.

    The global batch is that of the run file, for the run file's cluster. The planner chooses a plan for each number
    of devices; with --keep-plan only the data-parallel degree of one plan grows. --emulate gives a small cluster the
    share of the batch that it would have in a large one, and says what such a test cannot show.
    """
