"""Scores: olympic mean of the minutes of N runs, times the factor of the reference-convergence test.

raw_min     mean of run_start..run_stop without the fastest and the slowest; a run that failed is the slowest
score_min   raw_min * rcp_scaling
M > N runs  windows of N consecutive runs by their start; the window of the median score counts, and a window with
            two failed runs is infinitely slow (training_rules.adoc, "Scoring")
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import Benchmark, benchmark_names, load_benchmark, round_names, round_rules
from meshwright.mlperf.convergence import ConvergenceTest, convergence_test
from meshwright.mlperf.formulas import is_number
from meshwright.mlperf.log import RunLog, read_log

RESULTS = "result_*.txt"


@dataclass(frozen=True, kw_only=True)
class ScoredRun:
    """One run of a set. Without convergence `minutes` and `samples` are None and `problem` says why."""

    name: str  # of the file
    started_ms: float | None
    minutes: float | None
    samples: float | None  # to convergence: of the last evaluation before run_stop
    global_batch_size: int | None
    problem: str = ""

    @property
    def converged(self) -> bool:
        """Return True if the run reached the target."""
        return self.minutes is not None


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one set of runs of a benchmark on a system."""

    folder: Path
    benchmark: Benchmark
    round_from: str  # where the round is known from
    runs: tuple[ScoredRun, ...]  # all, in the order of their names
    scored: tuple[ScoredRun, ...]  # the N that count
    kept: tuple[str, ...]  # names of the runs in the mean
    dropped: tuple[str, ...]  # fastest and slowest
    raw_min: float | None
    test: ConvergenceTest
    global_batch_size: int | None
    problems: tuple[str, ...]  # why the set is no result

    @property
    def passes(self) -> bool:
        """Return True if the set is a result: no problem, and no faster convergence than allowed."""
        return not self.problems and self.test.passes

    @property
    def score_min(self) -> float | None:
        """Score in minutes: the olympic mean times the factor of the reference-convergence test."""
        return None if self.raw_min is None else self.raw_min * self.test.scaling


def result_folders(where: Path) -> list[Path]:
    """Folders at or below `where` that hold result files; raises InputError without one."""
    if where.is_file():
        raise InputError("a score needs a folder of result files", got=str(where), hint=f"name {where.parent}")
    if not where.is_dir():
        raise InputError("no such folder", got=str(where))
    found = sorted({p.parent for p in where.rglob(RESULTS)})
    if not found:
        raise InputError("no result_*.txt at or below this folder", got=str(where))
    return found


def result_files(folder: Path) -> list[Path]:
    """Everything in a folder with the name of a result file, by its number: reading refuses other content."""
    return sorted(folder.glob(RESULTS), key=_file_order)


def score_folder(
    folder: Path,
    *,
    round: str | None = None,
    benchmark: str | None = None,
    folders: Sequence[Path] = (),
    num_runs: int | None = None,
) -> Score:
    """Score one set of runs, or its first `num_runs`. Round and benchmark come from the logs if they are not given."""
    logs = [read_log(p) for p in result_files(folder)]
    rules, round_from = rules_of(logs, folder=folder, round=round, benchmark=benchmark, folders=folders)
    return score_logs(logs[:num_runs], rules, folder=folder, round_from=round_from)


def score_logs(logs: Sequence[RunLog], rules: Benchmark, *, folder: Path, round_from: str = "given") -> Score:
    """Score logs under rules."""
    runs = [scored_run(log, rules) for log in logs]
    batches = {r.global_batch_size for r in runs}
    named = [log.value("submission_benchmark") for log in logs]
    others = sorted({str(name)[:80] for name in named if name not in (rules.name, None)})
    problems: list[str] = []
    if others:
        problems.append(f"logs name other benchmarks: {', '.join(others)}")
    if None in batches:
        problems.append("a log has no global_batch_size")
    if len(batches - {None}) > 1:
        problems.append(f"batch sizes differ: {', '.join(map(str, sorted(b for b in batches if b)))}")
    if len(runs) < rules.runs:
        problems.append(f"{len(runs)} of {rules.runs} runs")
    batch = batches.pop() if len(batches) == 1 else None
    if len(runs) > rules.runs:
        chosen, windows = median_window(runs, rules, batch)
        if windows:
            problems.append(windows)
    else:
        chosen = runs
    raw, kept, dropped = olympic_minutes(chosen)
    failed = [r for r in chosen if not r.converged]
    if raw is None and len(failed) <= 1:
        problems.append("three runs are the least for an olympic mean")
    test = _test(chosen, rules, batch)
    return Score(
        folder=folder, benchmark=rules, round_from=round_from, runs=tuple(runs), scored=tuple(chosen),
        kept=kept, dropped=dropped, raw_min=raw, test=test, global_batch_size=batch, problems=tuple(problems),
    )  # fmt: skip


def scored_run(log: RunLog, rules: Benchmark) -> ScoredRun:
    """Time and samples to convergence of one log, and why they do not count."""
    start, stop = log.first("run_start"), log.first("run_stop")
    batch = log.value("global_batch_size")
    batch = int(batch) if is_number(batch) and batch >= 1 and batch == int(batch) else None
    samples, loss = _convergence(log)
    problem = ""
    if start is None:
        problem = "no run_start"
    elif stop is None:
        problem = "no run_stop: the log is not finished"
    elif len(log.all("run_start")) > 1 or len(log.all("run_stop")) > 1:
        problem = "several run_start or run_stop: the log does not say how long the run took"
    elif stop.metadata.get("status") != "success":
        problem = f"status of run_stop is {stop.metadata.get('status')!r}"
    elif stop.time_ms < start.time_ms:
        problem = "run_stop is before run_start"
    elif samples is None:
        problem = "no evaluation with a count of samples before run_stop"
    elif not rules.reached(loss):
        problem = f"the last evaluation, {loss:g}, misses the target of {rules.target:g}"
    minutes = None if problem or start is None or stop is None else (stop.time_ms - start.time_ms) / 60 / 1000
    return ScoredRun(
        name=log.path.name,
        started_ms=None if start is None else start.time_ms,
        minutes=minutes,
        samples=None if problem else samples,
        global_batch_size=batch,
        problem=problem,
    )


def olympic_minutes(runs: Sequence[ScoredRun]) -> tuple[float | None, tuple[str, ...], tuple[str, ...]]:
    """Raw minutes, runs in the mean and runs outside; None with two failed runs or fewer than three runs."""
    order = sorted(runs, key=lambda r: math.inf if r.minutes is None else r.minutes)
    kept = order[1:-1]
    times = [r.minutes for r in kept if r.minutes is not None]
    if not kept or len(times) < len(kept):
        return None, (), tuple(r.name for r in order)
    return sum(times) / len(times), tuple(r.name for r in kept), (order[0].name, order[-1].name)


def median_window(runs: Sequence[ScoredRun], rules: Benchmark, batch: int | None) -> tuple[list[ScoredRun], str]:
    """The N consecutive runs of the median score among all windows, and a problem if that one is invalid.

    An even number of windows gives the slower of the two middle ones.
    """
    order = sorted(runs, key=lambda r: (math.inf if r.started_ms is None else r.started_ms, r.name))
    windows = [order[i : i + rules.runs] for i in range(len(order) - rules.runs + 1)]

    def scored(window: list[ScoredRun]) -> float:
        raw = olympic_minutes(window)[0]
        test = _test(window, rules, batch)
        return math.inf if raw is None or not test.passes else raw * test.scaling

    ranked = sorted(windows, key=scored)
    median = ranked[len(ranked) // 2]
    invalid = sum(math.isinf(scored(w)) for w in windows)
    if math.isinf(scored(median)):
        return median, f"{invalid} of {len(windows)} windows of {rules.runs} consecutive runs are no result"
    return median, ""


def rules_of(
    logs: Sequence[RunLog], *, folder: Path, round: str | None, benchmark: str | None, folders: Sequence[Path] = ()
) -> tuple[Benchmark, str]:
    """Rules that a set falls under, and where its round is known from."""
    name = benchmark or next((n for log in logs if isinstance(n := log.value("submission_benchmark"), str)), None)
    if name is None and folder.name in benchmark_names(folders):
        name = folder.name
    if name is None:
        raise InputError(
            "the logs name no benchmark", got=str(folder), hint=f"--benchmark {'|'.join(benchmark_names(folders))}"
        )
    if round is not None:
        return load_benchmark(name, round, folders=folders), "given"
    newest = load_benchmark(name, folders=folders)
    if not newest.official:
        return newest, "newest of the benchmark's own"
    for part in reversed(folder.absolute().parts):
        found = re.search(r"(?<![\d.])v?(\d+\.\d+)$", part)
        if found and found.group(1) in round_names():
            return load_benchmark(name, found.group(1), folders=folders), f"folder {part}"
    started = [r.time_ms for log in logs if (r := log.first("run_start") or log.first("init_start")) is not None]
    if not started:
        raise InputError("neither the folder nor a date says the round", got=str(folder), hint="--round 5.1")
    return rules_at(name, min(started), folders)


def rules_at(name: str, time_ms: float, folders: Sequence[Path] = ()) -> tuple[Benchmark, str]:
    """Rules of the first round that was published after a time, and that day."""
    try:
        day = datetime.fromtimestamp(time_ms / 1000, tz=UTC).date().isoformat()
    except (OverflowError, ValueError, OSError) as error:
        raise InputError("the date of the run says no round", got=time_ms, hint="--round 5.1") from error
    for round in round_names():
        published = round_rules(round).published
        if not published or day <= published:
            return load_benchmark(name, round, folders=folders), f"date of the run, {day}"
    raise InputError("the date of the run says no round", got=day, hint="--round 5.1")


def _convergence(log: RunLog) -> tuple[float | None, float]:
    """Samples and loss of the last evaluation before run_stop."""
    stop = log.first("run_stop")
    found = [r for r in log.all("eval_accuracy", "eval_error") if stop is None or r.line < stop.line]
    if not found:
        return None, math.nan
    value = found[-1].value
    return found[-1].samples, float(value) if is_number(value) else math.nan


def _test(runs: Sequence[ScoredRun], rules: Benchmark, batch: int | None) -> ConvergenceTest:
    if batch is None:
        return ConvergenceTest(passes=False, message="the runs have no common global batch size")
    return convergence_test(rules, [r.samples for r in runs], global_batch_size=batch)


def _file_order(path: Path) -> tuple[int, str]:
    number = re.search(r"(\d{1,9})", path.name)
    return (int(number.group(1)) if number else -1, path.name)
