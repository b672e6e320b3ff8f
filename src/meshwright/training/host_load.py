"""Processor time that other programs take from the CPUs of this process while something is measured.

Linux counts it in /proc/stat, by CPU: time that a CPU worked, and time that a hypervisor withheld (steal).
The time of this process and its sibling ranks is subtracted. On other systems, and in intervals too short for
the kernel's 10 ms ticks, the load is unknown.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
SHORTEST_S = 0.2
"""A shorter interval has fewer than 20 ticks of a CPU."""
LEAST_LEFT_RATIO = 0.05
"""Smallest share of the CPUs that a load leaves: a few seconds measure no smaller share well enough to predict."""
BUSY_RATIO, STOLEN_RATIO = 0.15, 0.05
"""Shares of the CPUs' time from which a machine counts as busy. An idle desktop stays below 5 %."""


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Seconds counted since the machine started, summed over the CPUs of this process, and its own seconds."""

    busy_s: float
    stolen_s: float
    own_s: float
    time_s: float
    num_cpus: int


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """Shares of the CPUs' time between two samples."""

    others_ratio: float  # used by other programs
    stolen_ratio: float  # withheld by the hypervisor
    num_cpus: int = 1

    @property
    def is_busy(self) -> bool:
        """True if a measurement would say more about other programs than about this one."""
        return self.others_ratio > BUSY_RATIO or self.stolen_ratio > STOLEN_RATIO

    def slowdown(self, *, num_threads: int) -> float:
        """Ratio of the time of `num_threads` busy threads under this load to their time on an idle machine.

        L threads of others and T own ones share C CPUs, and the scheduler gives each the same time. While all of them
        ran, the others used u of the CPUs' time, and the hypervisor withheld s of it:

            L + T <= C   u = L / C          each has a CPU of its own; the load costs nothing
            L + T > C    u = L / (L + T)    each has C / (L + T) of a CPU
            L            = u C,  or  u T / (1 - u)  where u > 1 - T / C
            slowdown     = max(1, (L + T) / max(C, T)) / (1 - s)

        So T = C threads that were left 40 % of the CPUs take 1 / 0.4 = 2.5 times as long. At least
        `LEAST_LEFT_RATIO` of the CPUs is taken to be left.

        >>> HostLoad(others_ratio=0.6, stolen_ratio=0.0, num_cpus=2).slowdown(num_threads=2)
        2.5
        >>> HostLoad(others_ratio=0.5, stolen_ratio=0.0, num_cpus=8).slowdown(num_threads=4)
        1.0
        """
        used = min(self.others_ratio, 1 - LEAST_LEFT_RATIO)
        threads, cpus = max(1, num_threads), self.num_cpus
        is_full = used > 1 - threads / cpus
        others = used * threads / (1 - used) if is_full else used * cpus
        left = max(LEAST_LEFT_RATIO, 1 - self.stolen_ratio)
        return max(1.0, (others + threads) / max(cpus, threads)) / left

    @property
    def text(self) -> str:
        """The shares for a message."""
        parts = [f"other programs used {self.others_ratio:.0%} of its processors' time"]
        if self.stolen_ratio > STOLEN_RATIO:
            parts.append(f"the hypervisor withheld {self.stolen_ratio:.0%}")
        return " and ".join(parts).replace("%", " %")


def sample_load() -> LoadSample | None:
    """Read the counters; None where the system has none."""
    try:
        text = STAT.read_text()
    except OSError:
        return None
    busy_s, stolen_s, num_cpus = cpu_seconds(text, cpus=os.sched_getaffinity(0))
    used = os.times()
    return LoadSample(
        busy_s=busy_s, stolen_s=stolen_s, own_s=used.user + used.system, time_s=time.perf_counter(), num_cpus=num_cpus
    )


def cpu_seconds(text: str, *, cpus: set[int]) -> tuple[float, float, int]:
    """Return the seconds worked and stolen on `cpus`, and how many of them /proc/stat lists.

    >>> cpu_seconds("cpu 9\\ncpu0 100 0 50 800 0 0 0 20 0 0\\ncpu1 900 0 0 0 0 0 0 0 0 0\\n", cpus={0})
    (1.5, 0.2, 1)
    """
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    busy, stolen, found = 0, 0, 0
    for line in text.splitlines():
        name, *values = line.split()
        if not (name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus):
            continue
        user, nice, system, _, _, irq, softirq, steal = map(int, values[:8])
        busy += user + nice + system + irq + softirq
        stolen += steal
        found += 1
    return busy / ticks_per_s, stolen / ticks_per_s, found


def load_between(before: LoadSample | None, after: LoadSample | None, *, own_s: float) -> HostLoad | None:
    """Return the load of the machine between two samples; all ranks on it used `own_s`. None if unknown."""
    if before is None or after is None or not after.num_cpus:
        return None
    seconds = after.time_s - before.time_s
    if seconds < SHORTEST_S:
        return None
    whole_s = seconds * after.num_cpus
    return HostLoad(
        others_ratio=min(1.0, max(0.0, after.busy_s - before.busy_s - own_s) / whole_s),
        stolen_ratio=min(1.0, max(0.0, after.stolen_s - before.stolen_s) / whole_s),
        num_cpus=after.num_cpus,
    )


def busy_now() -> str | None:
    """The shares of other programs in a short wait of this one, as text, if the machine is busy."""
    before = sample_load()
    time.sleep(1.5 * SHORTEST_S)
    after = sample_load()
    load = None if before is None or after is None else load_between(before, after, own_s=after.own_s - before.own_s)
    return load.text if load is not None and load.is_busy else None
