"""What MaxText's processes leave behind, and where; its metrics as the step log that every engine leaves.

MaxText writes a line of JSON when a step's numbers have arrived, a step late, and times from dispatch to dispatch:
times of single steps belong to their neighbours, at both ends above all. The time of a step is therefore the mean over
the steps around it, WINDOW in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.engines.external_record import OutputLayout
from meshwright.engines.maxtext.lower import NAME, OUTPUT, RUN_FILE

WINDOW = 5
METRICS = "metrics.jsonl"
LOSS, VALIDATION_LOSS = "learning/loss", "evaluation/loss"  # one of them is in every line


def checkpoints(folder: Path) -> list[Path]:
    """MaxText's checkpoints below `folder`, oldest first; those that are whole."""
    found = [path for path in (folder / NAME / "checkpoints").glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=checkpoints)


def step_entry(line: dict[str, Any], *, ended_s: float) -> dict[str, Any]:
    """A line of MaxText's metrics as one of the step log; memory is not known yet."""
    return {
        "step": int(line["step"]),
        "loss": line[LOSS],
        "gradient_norm": line["learning/raw_grad_norm"],
        "learning_rate": line["learning/current_learning_rate"],
        "step_s": line["perf/step_time_seconds"],
        "ended_s": line.get("ended_s", ended_s),  # our loop says when
        "memory_bytes": 0,
    }


def validation_entry(line: dict[str, Any]) -> dict[str, Any] | None:
    """A line of our loop about an evaluation; None: about a step."""
    if VALIDATION_LOSS not in line:
        return None
    return {"step": int(line["step"]), "validation_loss": line[VALIDATION_LOSS]}


def smoothed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`entries` with times that are means over `WINDOW` steps, ending where the first one says plus those."""
    times = [entry["step_s"] for entry in entries]
    half = WINDOW // 2
    done = []
    ended_s = entries[0]["ended_s"] - times[0] if entries else 0.0
    for i, entry in enumerate(entries):
        around = times[max(0, i - half) : i + half + 1]
        step_s = sum(around) / len(around)
        ended_s += step_s
        done.append(entry | {"step_s": step_s, "ended_s": ended_s})
    return done


def whole_lines(path: Path, *, start: int) -> tuple[list[dict[str, Any]], int]:
    """The lines from byte `start` on that are whole, and where they end."""
    if not path.is_file():
        return [], start
    with path.open("rb") as stream:
        stream.seek(start)
        text = stream.read()
    end = text.rfind(b"\n") + 1
    return [json.loads(line) for line in text[:end].splitlines()], start + end
