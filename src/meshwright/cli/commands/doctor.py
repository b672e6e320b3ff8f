"""`meshwright doctor`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.options import count_option, file_option, json_option, root_option
from meshwright.cli.verbs import verb


@verb(
    "doctor",
    body="meshwright.cli.doctor:run",
    examples=[
        "meshwright doctor",
        "meshwright doctor --json > $(hostname).json",
        "meshwright doctor --expect-devices 8 --no-rates",
        "meshwright doctor --only devices,network",
        "meshwright doctor --compare node*.json --exclude-file exclude.txt",
        "torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-0:29500 "
        "-m meshwright doctor --pairs",
    ],
)
@click.argument("reports", nargs=-1, metavar="[REPORT.json]...", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--compare", "is_comparison", is_flag=True, help="Compare the reports of many nodes.")
@click.option("--pairs", "is_of_pairs", is_flag=True, help="Measure the rate between every two nodes of a torchrun.")
@click.option(
    "--pair-bytes", "pair_bytes", metavar="SIZE", default="64MiB", show_default=True,
    help="With --pairs: what a process sends to its partner.",
)  # fmt: skip
@file_option(
    "--exclude-file",
    help="With --compare or --pairs: write the hosts to exclude, one per line, for `srun --exclude ./FILE`.",
)  # fmt: skip
@count_option(
    "--expect-devices", low=0,
    help="Number of devices that the node should have.  [default: as in its usual node; fewer is a warning]",
)  # fmt: skip
@click.option(
    "--rates/--no-rates", default=None,
    help="Measure GEMM, copy and all-reduce rates.  [default: if there are devices and PyTorch]",
)  # fmt: skip
@click.option(
    "--log-hours", type=click.FloatRange(min=0), default=24.0, show_default=True, metavar="HOURS",
    help="Hours of the kernel log to read.",
)  # fmt: skip
@click.option(
    "--only", metavar="GROUPS",
    help="Run these groups of checks, of host, limits, log, network, devices and rates, separated by commas.",
)  # fmt: skip
@click.option("--skip", metavar="GROUPS", help="Run all groups of checks but these.")
@root_option
@json_option
def command() -> None:
    """Check the health and the rates of a node; compare many nodes.

    Checks the host, the limits of this process, the kernel log, the network cards and the devices, and measures the
    devices against the catalogue's values for the same device. Needs no root, no GPU and no PyTorch: what it cannot
    see is skipped, with the reason. Exits with 1 when a check fails.

    With --compare it reads the reports of many nodes (from `meshwright doctor --json` on each) and names the nodes
    that differ from the majority. It then exits with 1 when hosts should be excluded.

    With --pairs, in the processes that torchrun starts on all nodes, every two nodes send data to each other while no
    other pair shares them. It names nodes and links that are slower than the others, and exits with 1 if any is.
    """
