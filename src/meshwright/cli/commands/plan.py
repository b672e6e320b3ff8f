"""`meshwright plan`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import count_option, file_option, html_option, write_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb

DEFAULT_SCORED, MOST_SCORED = 10_000, 100_000


@verb(
    "plan",
    question="meshwright.api.plan:plan",
    without=("neighbours", "switches", "scored"),
    body="meshwright.cli.plan:run",
)
@key_options("calibration")
@click.option(
    "--explain",
    is_flag=True,
    help="Explain why the first plan is best, what the next ones lose, and which batch sizes, numbers of devices and "
    "switches of software near these are faster.",
)
@click.option(
    "--all", "show_all", is_flag=True,
    help="Show every plan that is scored, not the best of each layout only: as a table, and with --json and --csv.",
)  # fmt: skip
@count_option("--limit", default=DEFAULT_SCORED, high=MOST_SCORED, help="Number of plans that --all and --html list.")
@file_option(
    "--csv", "csv_path", metavar="OUT.csv",
    help="Write the plans to this file, one row each: degrees, estimates with their intervals, components, memory.",
)  # fmt: skip
@write_option(help="Write a run file that pins the first plan.")
@html_option
def command() -> None:
    """Search all legal sharding plans and rank them.

    A plan is the data, tensor, sequence, context, expert and pipeline parallelism of a run, with its schedule,
    micro-batch and activation recomputation. Each is ranked by its estimated step time, tokens/s per device, MFU and
    memory per device, with 80 % intervals. Exits with 1 when no plan fits.

    Describe the run with RUN.yaml, or with --model, --cluster, --gbs and --seq, or with both: then options replace
    keys of the file. A plan that the file pins is ignored.

    --html writes a page in which the scored plans are filtered and sorted, and any two of them compared.
    """
