"""Kill a training with all its processes, as a lost machine does."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

LIMIT_S = 60.0


def kill_group(process: Any) -> None:
    """Send SIGKILL to the process group of `process`, and wait until none of it is left.

    Ranks that were forked share the locks of their parent, and may end a moment after it.
    """
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    deadline_s = time.monotonic() + LIMIT_S
    while is_there(process.pid):
        assert time.monotonic() < deadline_s, f"processes of group {process.pid} do not end"
        time.sleep(0.005)


def is_there(group: int) -> bool:
    """Return True while the process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
