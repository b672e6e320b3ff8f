"""`meshwright mlperf run`: a set of finished runs from a benchmark and a submitter's choices."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.engines.base import Measuring, TrainOptions, refuse
from meshwright.errors import InputError
from meshwright.json_values import picked
from meshwright.mlperf.benchmarks import Benchmark, load_benchmark
from meshwright.mlperf.convergence import reference_points
from meshwright.mlperf.inputs import BenchmarkInputs, check_data, find_inputs
from meshwright.mlperf.prospects import prospect
from meshwright.mlperf.run_files import benchmark_run
from meshwright.mlperf.run_log import SUCCESS
from meshwright.mlperf.run_set import Report, RunResult, RunSet, RunState, new_seeds, open_set, results_of, run_set
from meshwright.mlperf.system_description import describe_system, write_description
from meshwright.programs import find_program
from meshwright.result import Result
from meshwright.specs.run import Run
from meshwright.training.rendezvous import under_launcher
from meshwright.units import format_duration

NOT_MLPERF = "Not an MLPerf result: {name} is a proxy of Meshwright's own. Its results compare with none of MLPerf."
UNVERIFIED = "Unverified: result not verified by MLCommons Association."


@dataclass(frozen=True, kw_only=True)
class RunChoices:
    """Choices of a submitter that are not in the run file."""

    num_runs: int | None = None  # None: as many as a score takes
    seeds: tuple[int, ...] = ()  # empty: from the system
    division: str = "closed"
    org: str = "unnamed"
    platform: str | None = None  # None: the name of this machine's processor
    status: str = "Research, Development, or Internal (RDI)"
    data: Path | None = None
    weights: Path | None = None
    system: Path | None = None  # JSON that is laid over the description of this machine
    warm_up_steps: int | None = None
    num_concurrent: int | None = None
    launcher: tuple[str, ...] = ()  # command that starts the processes of a run, on several hosts


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchmarkRuns(Result):
    """A set of runs that has ended.

    Attributes:
        benchmark: its name.
        round: round whose rules applied.
        folder: result files, records and the description of the system.
        results: index, seed, status, seconds, samples, loss and log of each run.
        num_runs: runs of the set.
        target: loss that ends a run.
        missing_system_fields: fields of the system description that the machine does not tell.
        label: statement that these results are not MLPerf's.
        notes: points that a reviewer would ask about.
    """

    benchmark: str
    round: str
    folder: Path
    results: tuple[RunResult, ...]
    num_runs: int
    target: float
    missing_system_fields: tuple[str, ...]
    label: str
    notes: tuple[str, ...] = field(default=())

    @property
    def num_converged(self) -> int:
        """Runs that reached the target."""
        return sum(result.status == "success" for result in self.results)

    @property
    def mean_minutes(self) -> float | None:
        """Olympic mean of the minutes: without the fastest and the slowest run; None with fewer than three."""
        minutes = sorted(result.seconds / 60 for result in self.results)
        return statistics.mean(minutes[1:-1]) if len(minutes) > 2 and self.num_converged >= len(minutes) - 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {
            **picked(self, "benchmark", "round"), "folder": str(self.folder),
            **picked(self, "num_runs", "num_converged", "target"), "raw_min": self.mean_minutes, "label": self.label,
            "missing_system_fields": list(self.missing_system_fields), "notes": list(self.notes),
            "runs": [
                picked(result, "index", "seed", "status")
                | {"minutes": result.seconds / 60, "samples": result.samples, "loss": result.loss}
                | {"log": str(result.log)}
                for result in self.results
            ],
        }  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each run."""
        return self.to_dict()["runs"]

    def summary(self) -> str:
        """Return the benchmark, how many runs reached the target, and the raw olympic mean."""
        minutes = "" if self.mean_minutes is None else f", olympic mean {self.mean_minutes:.3f} min, raw"
        return f"{self.benchmark}: {self.num_converged} of {self.num_runs} runs reached {self.target:g}{minutes}"


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """A set before its first run, or in the middle of its runs."""

    benchmark: Benchmark
    run: Run
    held: RunSet
    inputs: BenchmarkInputs
    folder: Path
    missing_system_fields: tuple[str, ...]
    notes: tuple[str, ...] = ()


def named_benchmark(name: str, *, round_name: str | None) -> tuple[Benchmark, tuple[str, ...]]:
    """The benchmark `name`, or the benchmark of a run file, with the file's keys as overrides.

    A run file belongs to the benchmark that its `name` names.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return load_benchmark(name, round_name), ()
    run = runfile.load(path)
    return load_benchmark(run.name, round_name), _as_overrides(run)


def _as_overrides(run: Run) -> tuple[str, ...]:
    import json

    from ruamel.yaml import YAML

    content = YAML(typ="safe").load(run.text)
    flat: list[str] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and path not in ("model", "lora", "parallel", "data.source", "data.validation"):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        else:
            flat.append(f"{path}={json.dumps(value)}")

    walk({key: value for key, value in content.items() if key != "name"}, "")
    return (*flat, *run.overrides)


def prepare_set(benchmark: Benchmark, *, folder: Path, overrides: tuple[str, ...], choices: RunChoices) -> PreparedSet:
    """Check everything that can be checked before the first run, and open the set in `folder`."""
    from meshwright.mlperf.worker import observed_engine

    if under_launcher():
        raise InputError(
            "a set of runs starts the processes of each run itself, and is no process of a launcher",
            hint="meshwright mlperf run ... --launcher 'torchrun --no-python ...'",
        )
    inputs = find_inputs(benchmark, data=choices.data, weights=choices.weights)
    run = benchmark_run(
        benchmark, overrides=overrides, train=inputs.train, validation=inputs.validation, weights=inputs.weights,
        division=choices.division,
    )  # fmt: skip
    engine = observed_engine(run)
    if choices.launcher:
        _require_launcher(choices)
        refuse(run.engine, engine.check(run))
    else:
        engine.prepare(run, options=TrainOptions(folder=folder, measuring=Measuring.NEVER, only_steps=True))
    seeds, num_runs = _seeds(benchmark, choices)
    training = benchmark.training
    threads = training.get("threads")
    usual_warm_up = training.get("warm_up_steps", 5) if engine.takes_warm_up else 0
    if choices.warm_up_steps and not engine.takes_warm_up:
        raise InputError(
            f"{run.engine} takes no warm-up steps on random tokens", got=f"--warm-up-steps {choices.warm_up_steps}",
            allowed=0,
        )  # fmt: skip
    at_once = 1 if threads is None or choices.launcher else max(1, num_cores() // threads)
    here = choices.platform or f"{num_cores()}x{platform.machine()}"
    wanted = RunSet(
        benchmark=benchmark.name, round=benchmark.round, num_runs=num_runs, seeds=seeds,
        seeds_from="given" if choices.seeds else "system", division=choices.division,
        run_text=runfile.changed_text(run, {}, wanted=run, what="the run of the benchmark"),
        submission={"org": choices.org, "platform": here, "status": choices.status},
        train_samples=inputs.train_samples, facts=dict(inputs.facts),
        warm_up_steps=usual_warm_up if choices.warm_up_steps is None else choices.warm_up_steps,
        threads=threads, num_concurrent=choices.num_concurrent or at_once, launcher=choices.launcher,
    )  # fmt: skip
    held = open_set(folder, wanted)
    description = describe_system(
        run, submitter=choices.org, division=choices.division, status=choices.status, given=choices.system
    )
    write_description(folder, description)
    notes = {
        f"a score takes {benchmark.runs} runs, this set has {num_runs}": num_runs != benchmark.runs,
        f"{run.engine} takes no warm-up steps: kernels are compiled on the clock": not engine.takes_warm_up,
        "seeds are given: the rules ask for seeds of the system": choices.seeds,
        "system.json describes this host: give number_of_nodes with --system FILE": choices.launcher,
        "open division: not compared with results of the closed one": choices.division == "open",
    }
    return PreparedSet(
        benchmark=benchmark, run=run, held=held, inputs=inputs, folder=folder,
        missing_system_fields=description.missing, notes=tuple(note for note, applies in notes.items() if applies),
    )  # fmt: skip


def take_runs(prepared: PreparedSet, *, report: Report) -> BenchmarkRuns:
    """Take the runs of the set that are missing. The data set is read through once before, off the clock."""
    if len(results_of(prepared.folder, prepared.held)) < prepared.held.num_runs:
        check_data(prepared.run)
    results = run_set(prepared.folder, prepared.held, inputs=prepared.inputs, report=report)
    return BenchmarkRuns(
        benchmark=prepared.benchmark.name, round=prepared.benchmark.round, folder=prepared.folder,
        results=tuple(results), num_runs=prepared.held.num_runs, target=prepared.benchmark.target,
        missing_system_fields=prepared.missing_system_fields, label=label_of(prepared.benchmark), notes=prepared.notes,
    )  # fmt: skip


def label_of(benchmark: Benchmark) -> str:
    """Label of every output about results of the benchmark."""
    return UNVERIFIED if benchmark.official else NOT_MLPERF.format(name=benchmark.name)


def _require_launcher(choices: RunChoices) -> None:
    """Raise InputError where the command that starts the processes of a run cannot be used."""
    if find_program(choices.launcher[0]) is None:
        raise InputError("--launcher: there is no such program", got=choices.launcher[0])
    if (choices.num_concurrent or 1) > 1:
        raise InputError(
            "runs of a launcher take place one after another", got=f"--concurrent {choices.num_concurrent}"
        )


def _seeds(benchmark: Benchmark, choices: RunChoices) -> tuple[tuple[int, ...], int]:
    num_runs = choices.num_runs or (len(choices.seeds) if choices.seeds else benchmark.runs)
    if not choices.seeds:
        return new_seeds(num_runs), num_runs
    if len(set(choices.seeds)) != len(choices.seeds) or len(choices.seeds) != num_runs:
        raise InputError(
            "--seeds must be different, one a run", got=", ".join(map(str, choices.seeds)), allowed=f"{num_runs} seeds"
        )
    return choices.seeds, num_runs


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_mapping(prepared: PreparedSet) -> Mapping[str, Any]:
    """The set before its runs, for a dry run."""
    return {
        **picked(prepared.held, "benchmark", "round", "num_runs", "num_concurrent", "warm_up_steps"),
        "run_file": prepared.held.run_text, "notes": list(prepared.notes),
        "missing_system_fields": list(prepared.missing_system_fields),
    }  # fmt: skip


class SetProgress:
    """Says each run that ends at once, and how far the others are now and then."""

    def __init__(
        self, benchmark: Benchmark, held: RunSet, *, global_batch: int, say: Callable[[str], None], every_s: float
    ) -> None:
        self.global_batch = global_batch
        self.benchmark, self.held, self.say, self.every_s = benchmark, held, say, every_s
        self.said: set[int] = set()
        self.last_s = 0.0
        self.is_first = True

    def report(self, done: dict[int, RunResult], active: list[RunState]) -> None:
        """Called with the runs that have ended, earlier commands' included, and the runs under way."""
        if self.is_first and done:
            self.say(f"{len(done)} of {self.held.num_runs} runs had ended before")
            self.said |= {result.index for result in done.values() if result.index not in {s.index for s in active}}
        self.is_first = False
        for index in sorted(set(done) - self.said):
            self.said.add(index)
            self.say(self._ended(done[index], num_done=len(done)) + self._prospect(done))
        if active and time.monotonic() - self.last_s >= self.every_s:
            self.last_s = time.monotonic()
            self.say(self._under_way(done, active))

    def _ended(self, result: RunResult, *, num_done: int) -> str:
        word = "reached" if result.status == "success" else "did not reach"
        return (
            f"run {result.index} ({num_done} of {self.held.num_runs}): {word} {self.benchmark.target:g} with "
            f"{result.loss:.4f} after {result.samples:,} samples in {format_duration(result.seconds)}"
        )

    def _prospect(self, done: dict[int, RunResult]) -> str:
        """Probability that a whole set passes the reference-convergence test."""
        if self.held.num_runs != self.benchmark.runs or not reference_points(self.benchmark):
            return ""
        samples = [r.samples if r.status == SUCCESS else None for r in done.values()]
        found = prospect(self.benchmark, samples, global_batch_size=self.global_batch)
        if found.problem:
            return f"; the set does not pass: {found.problem}"
        return f"; the set passes reference convergence with {100 * found.probability:.0f} %"

    def _under_way(self, done: dict[int, RunResult], active: list[RunState]) -> str:
        each = "; ".join(
            f"run {state.index} "
            + ("starts" if state.loss is None else f"{state.samples:,} samples, loss {state.loss:.4f}")
            for state in active
        )
        return f"{each}; target {self.benchmark.target:g}{self._left(done, active)}"

    def _left(self, done: dict[int, RunResult], active: list[RunState]) -> str:
        """The time that is left, from the runs that have ended."""
        if not done:
            return ""
        usual_s = statistics.median(result.seconds for result in done.values())
        left = self.held.num_runs - len(done)
        elapsed_s = sum(min(state.seconds, usual_s) for state in active)
        left_s = max(0.0, (left * usual_s - elapsed_s) / max(1, self.held.num_concurrent))
        return f"; about {format_duration(left_s)} left"
