"""Comparison of start-up times: the bare interpreter, help texts, look-ups, whole plans.

    python benchmarks/startup.py [--repeat 15] [--record FILE]

Runs are interleaved, so that a busy moment of the machine affects all equally; medians, and ratios to the first. It
takes about a minute. Exit status 1: a median is above its target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BASELINE = "python -c pass"
PLANS = {
    "plan of llama3.1-405b, 1,024 H100": "--model llama3.1-405b --cluster h100-8x128 --gbs 512 --seq 8192",
    "plan of deepseek-v3, 1,024 H100": "--model deepseek-v3 --cluster h100-8x128 --gbs 2048 --seq 4096",
}
COMMANDS = {
    BASELINE: ["-c", "pass"],
    "python -c 'import numpy'": ["-c", "import numpy"],
    "meshwright --help": ["-m", "meshwright", "--help"],
    "meshwright plan --help": ["-m", "meshwright", "plan", "--help"],
    "meshwright catalog models": ["-m", "meshwright", "catalog", "models"],
} | {name: ["-m", "meshwright", "plan", *question.split()] for name, question in PLANS.items()}
TARGETS_S = {"meshwright --help": 0.2, "meshwright plan --help": 0.2} | dict.fromkeys(PLANS, 0.6)


def wall_s(arguments: list[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start_s


def measure(repeat: int) -> dict[str, Any]:
    """Wall times of each command."""
    times_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeat):
        for name, arguments in COMMANDS.items():
            times_s[name].append(wall_s(arguments))
    return {
        "command": f"python benchmarks/startup.py --repeat {repeat}",
        "times_s": {
            name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in times_s.items()
        },
    }


def table(times_s: dict[str, dict[str, float]]) -> str:
    """The table in Markdown."""
    base = times_s[BASELINE]["median"]
    lines = ["| | ms (low to high) | ratio | target, ms |", "|---|--:|--:|--:|"]
    for name, time_s in times_s.items():
        median, low, high = (time_s[key] * 1e3 for key in ("median", "low", "high"))
        target = f"{TARGETS_S[name] * 1e3:.0f}" if name in TARGETS_S else ""
        lines.append(f"| {name} | {median:.0f} ({low:.0f} to {high:.0f}) | {median / base / 1e3:.1f} | {target} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--record", type=Path, help="write what was measured as JSON")
    chosen = parser.parse_args()
    found = measure(chosen.repeat)
    if chosen.record:
        from conditions import conditions  # PyTorch: only a record says where it was measured

        chosen.record.write_text(json.dumps(found | conditions(), indent=1) + "\n")
    print(table(found["times_s"]))
    slow = [name for name, target_s in TARGETS_S.items() if found["times_s"][name]["median"] > target_s]
    sys.exit(f"above the target: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
