"""`meshwright launch`: options and help."""

from __future__ import annotations

import click

from meshwright.cli.options import PathType, count_option, file_option, folder_option, run_argument
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb


@verb("launch", body="meshwright.cli.launch:run")
@run_argument()
@click.option(
    "--on", "place", type=click.Choice(["local", "slurm", "kubernetes", "skypilot", "ray"]), required=True,
    help="Where to start it: torchrun on this host, sbatch, kubectl, sky, or ray.",
)  # fmt: skip
@key_options("overrides")
@click.option("--dry-run", is_flag=True, help="Show every file and command; start nothing.")
@folder_option(
    "--out", "folder",
    help="Folder of files, logs and results; with it a dry run writes its files too.  [default: runs/NAME]",
)  # fmt: skip
@file_option(
    "--site", "site_path", envvar="MESHWRIGHT_SITE",
    help="Settings of this site: partition, network interface, image, ...  [default: $MESHWRIGHT_SITE]",
)  # fmt: skip
@click.option(
    "--env", "variables", metavar="NAME=VALUE", multiple=True,
    help="Set an environment variable of every process; NAME= removes one. May be repeated.",
)  # fmt: skip
@file_option(
    "--exclude-file",
    help="Hosts to exclude, one per line, as `meshwright doctor --compare` writes them.",
)  # fmt: skip
@count_option("--nodes", "num_nodes", help="Number of nodes.  [default: the cluster's]")
@count_option(
    "--devices-per-node",
    help="Devices per node, with one process each.  [default: the cluster's]",
)  # fmt: skip
@count_option("--max-restarts", low=0, default=3, help="Number of restarts after failures.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint in the run's folder, if any.")
@click.option("--numa", is_flag=True, help="Bind each process to the NUMA node of its device.")
@click.option("--force", is_flag=True, help="Overwrite the results of another training in --out.")
@click.option("--rendezvous", metavar="HOST:PORT", help="local: rendezvous endpoint on one of the hosts.")
@click.option("--partition", metavar="NAME", help="slurm: partition.")
@click.option("--account", metavar="NAME", help="slurm: account to charge.")
@click.option("--qos", metavar="NAME", help="slurm: quality of service.")
@click.option("--time", metavar="D-HH:MM:SS", help="slurm: time limit; 0 or UNLIMITED for none.")
@click.option("--container", metavar="IMAGE", help="slurm: container image to run in.")
@click.option(
    "--directive", "directives", metavar="--NAME=VALUE", multiple=True,
    help="slurm: another option of sbatch. May be repeated.",
)  # fmt: skip
@click.option("--wait", is_flag=True, help="slurm: wait for the end; the exit code is the run's.")
@click.option(
    "--kind", type=click.Choice(["pytorchjob", "jobset", "trainjob", "rayjob"]), help="kubernetes: kind of resource."
)
@click.option("--image", metavar="IMAGE", help="kubernetes: container image.")
@click.option("--namespace", metavar="NAME", help="kubernetes: namespace.")
@click.option(
    "--results", type=PathType(), metavar="DIR",
    help="kubernetes: folder of the results in the pods, on a volume claim.  [default: NAME on the first claim]",
)  # fmt: skip
def command() -> None:
    """Start a run on one host or many: torchrun, Slurm, Kubernetes, SkyPilot, Ray.

    Generates a torchrun command, an sbatch script, a manifest of Kubernetes, a task of SkyPilot or a script for Ray,
    with the environment variables that suit the accelerator, and starts it. --dry-run shows all of it, with the reason
    for every variable, and starts nothing.

    Options that begin with local:, slurm: or kubernetes: need that --on.
    """
