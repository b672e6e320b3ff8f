"""Time in which a local server was ready to run and had no processor, from the scheduler of Linux.

`/proc/PID/task/TID/schedstat` has the nanoseconds that a thread ran and the nanoseconds that it waited in a
run queue (kernel.org, Documentation/scheduler/sched-stats). Other programs on the machine raise a server's
latencies; the share shows by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")

ThreadTimes = Mapping[str, tuple[int, int]]
"""(nanoseconds run, nanoseconds waited) of each thread."""


def thread_times(pid: int, *, proc: Path = PROC) -> ThreadTimes:
    """Times of all threads of a process and of its descendants; empty where there is no such file system."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            text = stat.read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found: dict[str, tuple[int, int]] = {}
    open_pids = [pid]
    while open_pids:
        one = open_pids.pop()
        open_pids += children.get(one, [])
        for file in (proc / str(one) / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                run, wait = file.read_text(encoding="utf-8").split()[:2]
                found[file.parent.name] = int(run), int(wait)
    return found


def wait_ratio(before: ThreadTimes, after: ThreadTimes) -> float | None:
    """Share of its ready time in which the busiest thread waited for a processor; None where nothing ran.

    >>> wait_ratio({"1": (0, 0)}, {"1": (300, 100), "2": (20, 80)})
    0.25
    """
    spent = [
        (run - before.get(thread, (0, 0))[0], wait - before.get(thread, (0, 0))[1])
        for thread, (run, wait) in after.items()
    ]
    run, wait = max(spent, default=(0, 0))
    return wait / (run + wait) if run > 0 and wait >= 0 else None
