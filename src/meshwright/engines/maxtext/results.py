"""Checkpoints and metrics that MaxText's processes write, and the step log that all engines have.

MaxText writes a line of JSON when a step's metrics have arrived, one step late, and measures times between dispatches:
the time of a single step partly belongs to the adjacent steps, especially at both ends. The time of a step is therefore
the mean over WINDOW steps around it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.engines.external_record import OutputLayout
from meshwright.engines.maxtext.lower import NAME, OUTPUT, RUN_FILE
from meshwright.json_values import parse_json

WINDOW = 5
METRICS = "metrics.jsonl"
LOSS, VALIDATION_LOSS = "learning/loss", "evaluation/loss"  # every line has one of them


def checkpoints(folder: Path) -> list[Path]:
    """Return MaxText's complete checkpoints below `folder`, oldest first."""
    found = [path for path in (folder / NAME / "checkpoints").glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=checkpoints)


def step_entry(line: dict[str, Any], *, ended_s: float) -> dict[str, Any]:
    """Convert a line of MaxText's metrics to one of the step log; memory is not known yet."""
    return {
        "step": int(line["step"]),
        "loss": line[LOSS],
        "gradient_norm": line["learning/raw_grad_norm"],
        "learning_rate": line["learning/current_learning_rate"],
        "step_s": line["perf/step_time_seconds"],
        "ended_s": line.get("ended_s", ended_s),  # only Meshwright's loop writes it
        "memory_bytes": 0,
    }


def smoothed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `entries` with step times averaged over `WINDOW` steps, and end times that are consistent with them.

    Profiled steps and others are averaged apart.
    """
    done: list[dict[str, Any]] = []
    ended_s = entries[0]["ended_s"] - entries[0]["step_s"] if entries else 0.0
    for _, alike in groupby(entries, key=lambda entry: bool(entry.get("profiled"))):
        group = list(alike)
        for entry, step_s in zip(group, _averaged([e["step_s"] for e in group]), strict=True):
            ended_s += step_s
            done.append(entry | {"step_s": step_s, "ended_s": ended_s})
    return done


def _averaged(times: list[float]) -> list[float]:
    radius = WINDOW // 2
    around = [times[max(0, i - radius) : i + radius + 1] for i in range(len(times))]
    return [sum(window) / len(window) for window in around]


def complete_lines(path: Path, *, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines from byte `start` on, and the byte position of their end."""
    if not path.is_file():
        return [], start
    with path.open("rb") as stream:
        stream.seek(start)
        text = stream.read()
    end = text.rfind(b"\n") + 1
    return [parse_json(line) for line in text[:end].splitlines()], start + end
