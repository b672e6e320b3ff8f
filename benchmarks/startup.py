"""Comparison of start-up times: the bare interpreter, the group's help, one command's help, a look-up.

    python benchmarks/startup.py [--repeat 15]

Runs are interleaved, so that a busy moment of the machine affects all equally; medians, and ratios to the first. It
takes about half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import click'": ["-c", "import click"],
    "python -c 'import numpy'": ["-c", "import numpy"],
    "meshwright --help": ["-m", "meshwright", "--help"],
    "meshwright plan --help": ["-m", "meshwright", "plan", "--help"],
    "meshwright catalog models": ["-m", "meshwright", "catalog", "models"],
}
TARGET_S = 0.5  # of every help text


def wall_s(arguments: list[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat

    times_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeat):
        for name, arguments in COMMANDS.items():
            times_s[name].append(wall_s(arguments))

    baseline_s = statistics.median(times_s["python -c pass"])
    print(f"| n = {repeat} | median ms | min | max | ratio |\n|---|--:|--:|--:|--:|")
    for name, values in times_s.items():
        median_s = statistics.median(values)
        cells = (median_s, min(values), max(values))
        print(f"| {name} | {' | '.join(f'{s * 1e3:.0f}' for s in cells)} | {median_s / baseline_s:.1f} |")
    slow = [n for n, v in times_s.items() if n.endswith("--help") and statistics.median(v) > TARGET_S]
    sys.exit(f"above {TARGET_S} s: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
