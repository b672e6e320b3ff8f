"""Addresses by which the processes of a launch find each other, as torchrun sets them."""

from __future__ import annotations

import os
import socket

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun
LAUNCH_RESTARTS = "MESHWRIGHT_RESTARTS"  # set by `meshwright launch`, whose schedulers start whole jobs again


def under_launcher() -> bool:
    """Return True if a launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Return True if this is the first process of a training, or its only one."""
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    """Return the number of processes that a launcher has started; 0 without one."""
    return int(os.environ["WORLD_SIZE"]) if under_launcher() else 0


def is_restart() -> bool:
    """Return True if torchrun, or the scheduler of a job, started this process after another one was lost.

    torchrun counts restarts for each host: a host that only rejoins the others counts none.
    """
    counts = (os.environ.get(name, "0") for name in (RESTARTS, LAUNCH_RESTARTS))
    return any(int(count) > 0 for count in counts if count.isdecimal())


def free_port() -> int:
    """Return a TCP port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
