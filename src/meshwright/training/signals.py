"""Signals that stop a training.

    SIGTERM, SIGUSR1   stop after this step, with a checkpoint (schedulers send them before they take a machine away)
    SIGINT (Ctrl-C)    stop after this step, with a checkpoint; the second SIGINT stops at once

Until the data is open and the model is built (`StopRequest.at_once`) nothing can be saved, and all three stop at once.

The handler only sets a flag. The all-reduce of the step that is under way carries the flag to all processes, so all
save the same step and exit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from meshwright.errors import Terminated

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""A shell's exit code for a process that SIGTERM ended. All three signals ask to stop, so all three give it."""


class StopRequest:
    """`asked` is True once a signal asked this process to stop. The handler calls `on_first` at the first signal."""

    def __init__(self, on_first: Callable[[int], None] | None = None) -> None:
        self.asked = False
        self.on_first = on_first
        self.was_interrupted = False
        self.stops_at_once = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt or `Terminated` at the first signal while the context is open."""
        self.stops_at_once = True
        try:
            if self.asked:
                raise self.reason()
            yield
        finally:
            self.stops_at_once = False

    def reason(self) -> KeyboardInterrupt:
        """Return the exception that ends a program which was asked to stop and has nothing to save."""
        return KeyboardInterrupt() if self.was_interrupted else Terminated()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.was_interrupted:
            raise KeyboardInterrupt
        self.was_interrupted = self.was_interrupted or signum == signal.SIGINT
        is_first, self.asked = not self.asked, True
        if is_first and self.stops_at_once:
            raise self.reason()
        if is_first and self.on_first is not None:
            self.on_first(signum)


@contextmanager
def stop_on_signals(on_first: Callable[[int], None] | None = None) -> Iterator[StopRequest]:
    """A StopRequest that signals set while the context is open. Outside the main thread no handler is installed."""
    request = StopRequest(on_first)
    before = {}
    with suppress(ValueError):  # signals belong to the main thread
        before = {signum: signal.signal(signum, request._handle) for signum in ASKING}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def say_stopping(signum: int) -> None:
    """Write one line to stderr. Not with `print`: a handler may interrupt one."""
    again = "; Ctrl-C again stops at once" if signum == signal.SIGINT else ""
    os.write(2, f"{signal.Signals(signum).name}: stopping after this step{again}\n".encode())
