"""End a worker whose parent has ended: torchrun's agent, or the process that started the workers here.

A parent that is killed cannot end its workers, which would go on with the accelerators and the checkpoint folder in
their hands. The worker is first asked to stop, and so saves a checkpoint; after GRACE_S seconds it is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

POLL_S = 0.5
GRACE_S = 60.0
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT = "MESHWRIGHT_PARENT"
"""Environment variable of a worker that is started as a program of its own: the process that started it."""


def end_with_parent(*, grace_s: float = GRACE_S) -> None:
    """Watch the parent of this process from a thread, from now on. Call it once, early.

    Raises SystemExit if the parent has ended already: this process may have imported PyTorch for seconds.
    """
    starter, now, named = multiprocessing.parent_process(), os.getppid(), os.environ.pop(PARENT, None)
    was_there = starter is not None or named is None or int(named) == now

    def is_there() -> bool:
        return was_there and os.getppid() == now and (starter is None or starter.is_alive())

    if not is_there():
        print(f"process {os.getpid()}: its parent has ended, and so it ends", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGTERM)
    threading.Thread(target=_watch, args=(is_there, grace_s), name="parent watch", daemon=True).start()


def signal_at_end_of_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `by` to this process when the thread that started it ends. Linux only.

    A `preexec_fn` of programs that are not ours; our own watch their parent.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def end_with_torchrun() -> None:
    """The same if torchrun started this process. The parent of others, such as a shell, may end before them."""
    if TORCHRUN in os.environ:
        end_with_parent()


def _watch(is_there: Callable[[], bool], grace_s: float) -> None:
    while is_there():
        time.sleep(POLL_S)
    print(f"process {os.getpid()}: its parent has ended, and so it ends", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
