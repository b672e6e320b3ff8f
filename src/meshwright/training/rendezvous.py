"""Addresses by which the processes of a launch find each other, as torchrun sets them."""

from __future__ import annotations

import os
import socket


def under_launcher() -> bool:
    """Return True if a launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_processes() -> int:
    """Return the number of processes that a launcher has started; 0 without one."""
    return int(os.environ["WORLD_SIZE"]) if under_launcher() else 0


def free_port() -> int:
    """Return a TCP port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
