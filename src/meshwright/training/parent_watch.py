"""End a worker whose parent has ended: torchrun's agent, or the process that started the workers here.

A parent that is killed cannot end its workers, which would go on with the accelerators and the checkpoint folder in
their hands. The worker is first asked to stop, and so saves a checkpoint; after GRACE_S seconds it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

POLL_S = 0.5
GRACE_S = 60.0
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun


def end_with_parent(*, grace_s: float = GRACE_S) -> None:
    """Watch the parent of this process from a thread, from now on. Call it once, early."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent, grace_s), name="parent watch", daemon=True).start()


def end_with_torchrun() -> None:
    """The same if torchrun started this process. The parent of others, such as a shell, may end before them."""
    if TORCHRUN in os.environ:
        end_with_parent()


def _watch(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    print(f"process {os.getpid()}: its parent {parent} has ended, and so it ends", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
