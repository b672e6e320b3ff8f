"""Watchdog for processes that hang: stack traces on request, and the end of the process after a timeout.

    SIGUSR2    the process writes the stacks of all its threads to FOLDER/stacks/rank-00000.txt and continues
    timeout    a step takes longer than `--timeout` seconds: it writes the same and ends with exit code 1

In a step all processes wait for each other, so when one hangs all reach their timeout, and all stacks are written.
A restart appends to the file, under a line with its process and time.
The launcher then sees lost processes and starts again, or gives up.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO

STACKS = "stacks"
LOOK_EVERY_S = 1.0
GRACE_S = 2 * LOOK_EVERY_S
"""Time between writing the stacks and the end: the launcher kills the others at the first end, and they write too."""


class Watchdog:
    """Watches the steps of one process from its own thread while the context is open."""

    def __init__(self, folder: Path, *, rank: int, timeout_s: float) -> None:
        self.path = folder / STACKS / f"rank-{rank:05d}.txt"
        self.timeout_s = timeout_s
        self.rank = rank
        self._since_s: float | None = None  # None: nothing to watch
        self._closed = threading.Event()
        self._stream: IO[str] | None = None

    def __enter__(self) -> Watchdog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("a", encoding="utf-8")
        if self._stream.tell():  # the stacks of an earlier attempt, which a restart keeps
            self._stream.write(f"\n--- process {os.getpid()}, started {_now()}\n")
            self._stream.flush()
        faulthandler.register(signal.SIGUSR2, file=self._stream, all_threads=True)
        self._thread = threading.Thread(target=self._watch, args=(self._stream,), name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        self._closed.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        is_empty = os.fstat(self._stream.fileno()).st_size == 0
        self._stream.close()
        if is_empty:  # nothing was asked for
            self.path.unlink(missing_ok=True)

    def start_timer(self) -> None:
        """Start the timeout, or start it anew."""
        self._since_s = time.monotonic()

    def stop_timer(self) -> None:
        """Stop the timeout: opening data or waiting for a disk may take any time."""
        self._since_s = None

    def _watch(self, stream: IO[str]) -> None:
        every_s = min(LOOK_EVERY_S, self.timeout_s / 4)
        looked_s = time.monotonic()
        while not self._closed.wait(every_s):
            before_s, looked_s, since_s = looked_s, time.monotonic(), self._since_s
            if since_s is None:
                continue
            if looked_s - before_s > self.timeout_s / 2:  # the process itself was suspended (SIGSTOP)
                self._since_s = looked_s
            elif looked_s - since_s > self.timeout_s:
                self._end(stream)

    def _end(self, stream: IO[str]) -> None:
        faulthandler.dump_traceback(stream, all_threads=True)
        print(
            f"process {self.rank}: a step took longer than {self.timeout_s:g} s (--timeout); "
            f"its stack is in {self.path}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(GRACE_S)
        os._exit(1)


def _now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="seconds")


def stacks(folder: Path) -> Path | None:
    """The folder of stacks below `folder`; None where no stack was written."""
    written = folder / STACKS
    return written if written.is_dir() and any(p.stat().st_size for p in written.iterdir()) else None


def clear(folder: Path) -> None:
    """Remove the folder of stacks when nothing was written into it."""
    with suppress(OSError):  # it is not empty, or another process was faster
        (folder / STACKS).rmdir()
