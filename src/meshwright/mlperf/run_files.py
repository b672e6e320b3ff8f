"""Run files of benchmarks: the keys that the rules fix, with a submitter's choices.

A benchmark's table [training.run] holds the keys that its rules fix. Evaluation follows from the rules and the global
batch; the reference convergence points give the learning rate and warm-up of a batch without a choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from meshwright import runfile
from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.mlperf.benchmarks import DATA, Benchmark
from meshwright.mlperf.formulas import evaluate_formula
from meshwright.specs.run import Run

CHOSEN = tuple(toml_table(DATA / "runs.toml")["chosen"])
"""Settings of a run that the closed division leaves to the submitter, or that change no arithmetic."""


DEFAULT_BATCH = 16
"""Sequences, where a benchmark has no reference convergence point."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Hyperparameters of a reference convergence point."""

    global_batch: int
    learning_rate: float
    warmup_steps: int
    training_steps: int | None = None  # horizon of the schedule, where it is a choice


def references(benchmark: Benchmark) -> tuple[Reference, ...]:
    """Reference convergence points by global batch; empty: the benchmark has none yet."""
    if benchmark.rcp is None or not benchmark.rcp.is_file():
        return ()
    points = json.loads(benchmark.rcp.read_text(encoding="utf-8")).values()
    return tuple(sorted((_reference(point) for point in points), key=lambda found: found.global_batch))


def _reference(point: Mapping[str, Any]) -> Reference:
    chosen, batch = point["Hyperparams"], int(point["BS"])
    samples = chosen.get("opt_learning_rate_warmup_samples", 0)
    training = chosen.get("opt_learning_rate_training_steps")
    steps = int(chosen.get("opt_learning_rate_warmup_steps", math.ceil(samples / batch)))
    if training is not None and "opt_learning_rate_warmup_factor" in chosen:
        steps = round(float(chosen["opt_learning_rate_warmup_factor"]) * int(training))
    return Reference(
        global_batch=batch,
        learning_rate=float(chosen["opt_base_learning_rate"]),
        warmup_steps=steps,
        training_steps=None if training is None else int(training),
    )


def benchmark_run(
    benchmark: Benchmark,
    *,
    overrides: tuple[str, ...] = (),
    train: str,
    validation: str,
    weights: str | None,
    division: str = "closed",
) -> Run:
    """The run of a benchmark with a submitter's choices laid over it.

    Raises InputError for choices that the closed division does not allow.
    """
    content = _content(benchmark, train=train, validation=validation, weights=weights)
    smallest = next((point.global_batch for point in references(benchmark)), DEFAULT_BATCH)
    probe = {**content, "batch": {"global_sequences": smallest}, "train": {"steps": 1}}
    probe["optimizer"] = {**content["optimizer"], "warmup_steps": 0}
    batch_overrides = tuple(line for line in overrides if line.startswith("batch"))
    batch = runfile.from_mapping(probe, overrides=batch_overrides).global_batch
    _add_rules(content, benchmark, batch, overrides)
    run = runfile.from_mapping(content, overrides=overrides)
    if run.global_batch != batch:
        raise InputError("the global batch of a benchmark is given in sequences", hint="--set batch.global_sequences=N")
    if division == "closed":
        ruled = runfile.from_mapping(content, overrides=_compared(benchmark, batch, overrides))
        refuse_forbidden(run, ruled)
    return run


def refuse_forbidden(run: Run, ruled: Run) -> None:
    """Raise InputError with every setting of `run` that the rules fix and `ruled` has otherwise."""
    found = [
        f"{key} is {ours}, the rules have {theirs}"
        for key, ours, theirs in _differences(_plain(run), _plain(ruled))
        if not any(key == chosen or key.startswith(f"{chosen}.") for chosen in CHOSEN)
    ]
    if found:
        raise InputError(
            f"the closed division does not allow: {'; '.join(found)}",
            hint="--division open trains it; the open division is not compared with the closed one",
        )


def run_content(benchmark: Benchmark) -> dict[str, Any]:
    """The run file of a benchmark's rules. Raises InputError for a benchmark that has none."""
    if "run" not in benchmark.training:
        raise InputError(f"{benchmark.name} is checked and scored here, and not run: its rules have no run file")
    content = {**deepcopy(dict(benchmark.training["run"])), "name": benchmark.name}
    content.setdefault("cluster", "here")
    return content


def _content(benchmark: Benchmark, *, train: str, validation: str, weights: str | None) -> dict[str, Any]:
    content = run_content(benchmark)
    content["data"] |= {"source": train, "validation": validation}
    if weights is not None:
        content["weights"] = weights
    return content


def _add_rules(content: dict[str, Any], benchmark: Benchmark, batch: int, overrides: tuple[str, ...]) -> None:
    """Add batch, schedule, length and evaluation."""
    known = [point for point in references(benchmark) if point.global_batch <= batch] or list(references(benchmark)[:1])
    point = known[-1] if known else None
    content["batch"] = {"global_sequences": batch}
    if benchmark.training.get("whole_batch"):
        content["batch"]["micro"] = batch
    steps = max_steps(benchmark, batch) or (point.training_steps if point else None) or 1024
    optimizer = content["optimizer"]
    if point is None and "learning_rate" not in optimizer:
        if not any(line.startswith("optimizer") for line in overrides):
            raise InputError(
                f"{benchmark.name} has no reference convergence points to take a learning rate from",
                hint="--set optimizer.learning_rate=...",
            )
        optimizer["learning_rate"] = 1.0  # until the overrides
    if point is not None:
        optimizer.setdefault("learning_rate", point.learning_rate)
        optimizer.setdefault("warmup_steps", min(steps, point.warmup_steps))
    content["train"] = {
        "steps": steps,
        "evaluate": {
            "every_steps": benchmark.interval(batch) // batch,
            "skip_first": benchmark.skipped(batch),
            "num_sequences": benchmark.evaluation.samples,
            "target_loss": benchmark.target,
        },
    }


def max_steps(benchmark: Benchmark, batch: int) -> int | None:
    """Steps that the rules fix; None: the submitter chooses the horizon of the schedule."""
    rule = benchmark.hyperparameters.get("max_steps")
    if rule is None:
        return None
    if rule.value is not None:
        return int(rule.value)  # pyright: ignore[reportArgumentType]
    return int(evaluate_formula(rule.formulas[0], {"global_batch_size": batch}))


def _compared(benchmark: Benchmark, batch: int, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides of the batch, and of the steps where the horizon of the schedule is a choice."""
    keys = (
        ("batch",)
        if max_steps(benchmark, batch) is not None
        else ("batch", "train.steps", "train.tokens", "train.epochs")
    )
    return tuple(line for line in overrides if line.startswith(keys))


def _plain(run: Run) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(run), default=str))


def _differences(ours: Any, theirs: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for name in dict.fromkeys([*ours, *theirs])
            for found in _differences(ours.get(name), theirs.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if ours == theirs else [(key, ours, theirs)]
