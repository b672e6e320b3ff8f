"""The page of performance: every comparison on this machine, drawn from the records of the benchmarks.

    python benchmarks/performance.py [--measure training engines startup] [--python litgpt=PATH]

Without --measure the page is drawn from the records that are there. With it the named benchmarks run first, on an
otherwise idle machine: training takes about 40 minutes, engines 10, startup 1. A table says when, on what and at which
commit it was measured; a record that is older than its commit by more than a week is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a script, it finds the modules beside it
from benchmarks import startup, train_cpu  # noqa: E402 - the path comes first

RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "reference" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
DAYS = 7
"""A record is of the commit that it names if it was measured within so many days."""
Record = dict[str, Any]


def training(record: Record) -> list[str]:
    """Meshwright over each contender, as median and range of the rounds' ratios."""
    lines = [
        "| training, rounds | contender | tokens/s | tokens/cpu-s | first step, s | peak memory, MiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case, rows in record["cases"].items():
        ours = rows["meshwright"]
        for name, row in rows.items():
            if name == "meshwright":
                continue
            ratios = (_ratio(row[f"meshwright_over_it_{key}"]) for key in ("tokens_per_s", "tokens_per_cpu_s"))
            pairs = (
                f"{ours[key]['median'] / scale:,.{digits}f} : {row[key]['median'] / scale:,.{digits}f}"
                for key, scale, digits in (("start_up_s", 1, 1), ("peak_memory_bytes", 2**20, 0))
            )
            lines.append(f"| {case}, {ours['tokens_per_s']['n']} | {name} | {' | '.join((*ratios, *pairs))} |")
    return lines


def engines(record: Record) -> list[str]:
    """The native engine's median throughput over that of the other engines."""
    lines = ["| | engine | native : engine, tokens/s/device | ratio |", "|---|---|--:|--:|"]
    for label, rows in record["cases"].items():
        native, *others = (row["throughput"]["median"] for row in rows)
        for row, other in zip(rows[1:], others, strict=True):
            name = f"{row['engine']} {record['engines'][row['engine']]}"
            lines.append(f"| {label} | {name} | {native:,.0f} : {other:,.0f} | {native / other:.2f} |")
    return lines


def start_up(record: Record) -> list[str]:
    """Wall time of whole commands."""
    return startup.table(record["times_s"]).splitlines()


SUBJECTS: dict[str, tuple[str, str, str, Callable[[Record], list[str]]]] = {
    "training": ("Training beside other trainers", "train_cpu", "train-cpu.md", training),
    "engines": ("The native engine beside other engines", "engines_gap", "engines-gap.md", engines),
    "startup": ("Start-up and plans", "startup", "", start_up),
}


def measure(subject: str, *, options: list[str]) -> None:
    """Run a benchmark, which writes its record and its page."""
    _, record, page, _ = SUBJECTS[subject]
    command = [sys.executable, str(ROOT / "benchmarks" / f"{record}.py"), "--record", str(_path(record))]
    if page:
        command += ["--page", str(PAGE.parent / page)]
    done = subprocess.run([*command, *(options if subject == "training" else [])], cwd=ROOT)
    if done.returncode:
        print(f"{subject}: exit status {done.returncode}; what it said stands above", file=sys.stderr)


def measured_part() -> str:
    """All tables, from the records."""
    parts = []
    for title, name, page, draw in SUBJECTS.values():
        record = json.loads(_path(name).read_text(encoding="utf-8"))
        command = train_cpu.commands_of(record) if "commands" in record else f"`{record['command']}`"
        more = f" [All of it]({page})." if page else ""
        where = f"{record['date']}, {record['machine']}, commit {record['git_commit'][:10]}. {command}{more}"
        parts += [f"### {title}", where, "\n".join(draw(record))]
    return "\n\n".join(parts)


def days_behind(record: Record) -> int:
    """Days between the commit that a record names and its measurement."""
    shown = subprocess.run(
        ["git", "show", "-s", "--format=%cs", record["git_commit"].rstrip("+")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return (date.fromisoformat(record["date"]) - date.fromisoformat(shown.stdout.strip())).days


def _path(record: str) -> Path:
    return RECORDS / f"{record}.json"


def _ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", choices=SUBJECTS, default=[])
    chosen, options = parser.parse_known_args()
    for subject in chosen.measure:
        measure(subject, options=options)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{measured_part()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
