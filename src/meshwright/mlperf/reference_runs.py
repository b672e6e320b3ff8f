"""Reference convergence points from runs: 2 N of them at each global batch size, in the official schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.convergence import COUNT_KEYS, ReferencePoint, points_of, read_points
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.score import result_files, rules_of, scored_run

_NOT_HYPERPARAMETERS = ("global_batch_size", "train_samples", "eval_samples")


@dataclass(frozen=True, kw_only=True)
class ReferenceDescription:
    """Origin of the runs of a point."""

    creator: str
    when: str
    platform: str
    precision: str = "BF16"


def reference_document(
    folders: Sequence[Path],
    *,
    description: ReferenceDescription,
    round: str | None = None,
    benchmark: str | None = None,
    more_benchmarks: Sequence[Path] = (),
) -> tuple[dict[str, Any], Benchmark]:
    """Return the points of folders of runs, one batch size each. Raises InputError with all problems at once."""
    document: dict[str, Any] = {}
    problems: list[str] = []
    rules: Benchmark | None = None
    for folder in folders:
        logs = [read_log(path) for path in result_files(folder)]
        if not logs:
            raise InputError("no result_*.txt in this folder", got=str(folder))
        found, _ = rules_of(logs, folder=folder, round=round, benchmark=benchmark, folders=more_benchmarks)
        if rules is not None and found.name != rules.name:
            problems.append(f"{folder} is {found.name}, not {rules.name}")
            continue
        rules = found
        row, wrong = _point(folder, logs, rules, description)
        problems += wrong
        if row is not None:
            name = f"{rules.name}_ref_{row['BS']}"
            if name in document:
                problems.append(f"{folder} has batch size {row['BS']}, as another folder")
            document[name] = row
    if problems or rules is None:
        raise InputError("runs make no reference points:\n  " + "\n  ".join(problems))
    return document, rules


def reference_points_of(document: dict[str, Any], rules: Benchmark) -> tuple[ReferencePoint, ...]:
    """Points of a document in the official schema."""
    return points_of(document, path=Path(rules.name), runs=rules.runs)


def write_reference_file(path: Path, document: dict[str, Any], rules: Benchmark, *, replace: bool) -> dict[str, Any]:
    """Add points to the file `path`, atomically, and return all. Other values of a batch size need `replace`."""
    existing: dict[str, Any] = {}
    if path.exists():
        read_points(path, runs=rules.runs)
        existing = json.loads(path.read_text(encoding="utf-8"))
    same = [k for k in document if k in existing and existing[k] != document[k]]
    if same and not replace:
        raise InputError(f"{path} holds other values of {', '.join(same)}", hint="--replace")
    merged = dict(sorted({**existing, **document}.items(), key=lambda item: item[1]["BS"]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(merged, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return merged


def _point(
    folder: Path, logs: Sequence[RunLog], rules: Benchmark, description: ReferenceDescription
) -> tuple[dict[str, Any] | None, list[str]]:
    runs = [scored_run(log, rules) for log in logs]
    problems = [f"{folder}/{run.name}: {run.problem}" for run in runs if run.problem]
    batches = {run.global_batch_size for run in runs}
    if len(batches) != 1 or None in batches:
        problems.append(f"{folder}: the runs have no common global batch size")
    if len(runs) < 2 * rules.runs:
        problems.append(f"{folder}: {len(runs)} of the {2 * rules.runs} runs of a point")
    varied = [k for k in rules.hyperparameters if len({repr(log.value(k)) for log in logs}) > 1]
    problems += [f"{folder}: {key} differs between the runs" for key in varied]
    counts = [run.samples for run in runs if run.samples is not None]
    if problems:
        return None, problems
    hyperparameters = {
        key: logs[0].value(key)
        for key, rule in rules.hyperparameters.items()
        if rule.tunable and key not in _NOT_HYPERPARAMETERS and logs[0].last(key) is not None
    }
    row = {
        "Benchmark": rules.name,
        "Creator": description.creator,
        "When": description.when,
        "Platform": description.platform,
        "Precision": description.precision,
        "BS": batches.pop(),
        "Hyperparams": hyperparameters,
        COUNT_KEYS[0 if rules.name == "llama2_70b_lora" else 1]: [int(c) if c == int(c) else c for c in counts],
    }
    return row, []
