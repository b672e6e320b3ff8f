"""`meshwright rehearse`: options and help."""

from __future__ import annotations

from meshwright.cli.options import count_option, run_argument, seconds_option
from meshwright.cli.question import key_options
from meshwright.cli.verbs import verb

MAX_PROCESSES = 8  # a toy tensor has at least 8 rows: each process holds a shard of every tensor


@verb("rehearse", body="meshwright.cli.rehearse:run")
@run_argument()
@key_options("overrides")
@count_option(
    "--processes", "num_processes", low=2, high=MAX_PROCESSES, default=4,
    help="Maximum number of local processes.",
)  # fmt: skip
@seconds_option(
    "--timeout", "timeout_s", low=1, default=120.0,
    help="Time after which an unfinished rehearsal counts as a deadlock.",
)  # fmt: skip
def command() -> None:
    """Check a plan on local CPU processes against a single process.

    Runs the parallel structure of the run's plan on local CPU processes, with a smaller degree on each mesh axis and
    a model of toy width, and compares losses, gradients and weights with a single process. Finds wrong numerics
    and deadlocks before a GPU is rented. Exits with 1 when the numbers differ, when the processes deadlock, or when
    the native engine cannot run the plan.
    """
