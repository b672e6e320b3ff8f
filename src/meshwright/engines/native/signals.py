"""Signals: what stops a training, and how it stops.

SIGTERM asks the loop to stop: every process learns of it with the numbers of the step it is in, all save the same
step, and exit. The request is a flag; nothing happens inside the signal's handler.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""As a shell has it for a process that SIGTERM ended."""


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """A StopRequest that SIGTERM sets, while the context is open. Off the main thread nothing is installed."""
    request = StopRequest()
    try:
        before = signal.signal(signal.SIGTERM, request._handle)
    except ValueError:  # signals belong to the main thread
        yield request
        return
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
