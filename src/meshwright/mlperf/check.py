"""Checks of result files and of sets of them by our rules, which are stricter than the official checker's.

Each rule stands in `data/check_rules.toml`. A log that is being written is checked up to its last line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.check_clock import clock_findings
from meshwright.mlperf.check_evaluations import evaluation_findings, global_batch
from meshwright.mlperf.check_system import submitted_system, system_findings
from meshwright.mlperf.check_values import absent_keys, not_yet, value_findings
from meshwright.mlperf.findings import CheckFinding, check_rules, finding
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.score import result_files, rules_at, rules_of, score_logs

CADENCE = ("cadence-first", "cadence-interval")
_OTHER_FILES = (
    "scaling.json", "package_checker_params", "power",
    "set.json", "run.yaml", "system.json", "records", "runs", ".lock",  # of `mlperf run`, and not packaged
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Findings over one result file or one set of them."""

    where: Path
    benchmark: Benchmark
    round_from: str
    files: tuple[Path, ...]
    findings: tuple[CheckFinding, ...]
    pending: dict[str, tuple[str, ...]]  # file -> required keys that an unfinished log does not hold yet

    @property
    def errors(self) -> tuple[CheckFinding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def passes(self) -> bool:
        return not self.errors


def check_path(
    where: Path,
    *,
    round: str | None = None,
    benchmark: str | None = None,
    folders: Sequence[Path] = (),
    unfinished: bool = False,
) -> CheckReport:
    """Check a result file, or a folder of result_*.txt as a set. `unfinished`: logs may still be written."""
    files = [where] if where.is_file() else result_files(where) if where.is_dir() else []
    if not files:
        raise InputError("neither a result file nor a folder of result_*.txt", got=str(where))
    logs = [read_log(path) for path in files]
    folder = where if where.is_dir() else where.parent
    rules, round_from = rules_of(logs, folder=folder, round=round, benchmark=benchmark, folders=folders)
    whole = where.is_dir()
    found = list(chain.from_iterable(log_findings(log, rules) for log in logs))
    found += system_findings(logs, rules, submitted_system(folder), folder=folder)
    if whole:
        found += set_findings(logs, rules, folder, unfinished=unfinished)
    if unfinished:
        found = [f for f in found if f.rule != "unfinished"]
    pending = {
        log.path.name: tuple(k for k in absent_keys(log, rules) if not_yet(log, k)) for log in logs if not log.finished
    }
    return CheckReport(
        where=where, benchmark=rules, round_from=round_from, files=tuple(files), findings=tuple(_sorted(found)),
        pending=pending,
    )  # fmt: skip


def log_findings(log: RunLog, rules: Benchmark) -> list[CheckFinding]:
    """All findings of one log."""
    found = list(value_findings(log, rules))
    if not log.records:
        return found
    found += clock_findings(log, rules)
    if log.value("submission_division") != "open":
        found += _allowed_again(log, list(evaluation_findings(log, rules)), rules)
    return found


def _allowed_again(log: RunLog, found: list[CheckFinding], rules: Benchmark) -> list[CheckFinding]:
    """One warning for errors of cadence in a run of an earlier round that keeps the cadence of that round."""
    start = log.first("run_start")
    cadence = [f for f in found if f.rule in CADENCE]
    if not cadence or not rules.official or start is None:
        return found
    try:
        own = rules_at(rules.name, start.time_ms)[0]
    except InputError:  # the benchmark is newer than the run
        return found
    if own.round == rules.round or any(f.rule in CADENCE for f in evaluation_findings(log, own)):
        return found
    again = finding(log, "resubmitted", f"the evaluations have the cadence of round {own.round}", start)
    return [again, *(f for f in found if f.rule not in CADENCE)]


def set_findings(
    logs: Sequence[RunLog], rules: Benchmark, folder: Path, *, unfinished: bool = False
) -> Iterator[CheckFinding]:
    """Findings of a set of runs."""

    def of_set(rule: str, message: str) -> CheckFinding:
        return CheckFinding(file=folder.name, line=None, rule=rule, message=message)

    if len(logs) != rules.runs and not unfinished:
        yield of_set("result-count", f"{len(logs)} result files, a score needs {rules.runs}")
    others = [p.name for p in folder.iterdir() if p not in {log.path for log in logs} and p.name not in _OTHER_FILES]
    if others:
        yield of_set("result-names", f"other files: {', '.join(sorted(others)[:6])}")
    for key in ("division", "status", "org", "platform"):
        values = {repr(r.value) for log in logs if (r := log.last(f"submission_{key}")) is not None}
        if len(values) > 1:
            yield of_set("set-system", f"submission_{key} is {', '.join(sorted(values)[:4]):.160}")
    closed = any(log.value("submission_division") != "open" for log in logs)
    if closed:
        yield from _seeds(logs)
    yield from _copies(logs)
    batches = {b for log in logs if (b := global_batch(log)) is not None}
    if len(batches) > 1:
        yield of_set("set-batch", f"global batch sizes {', '.join(map(str, sorted(batches)))}")
    for key in rules.hyperparameters:
        values = {repr(log.value(key)) for log in logs if log.last(key) is not None}
        if len(values) > 1 and key != "global_batch_size" and key != "train_samples":
            yield of_set("set-hyperparameters", f"{key} is {', '.join(sorted(values)[:4]):.160}")
    if closed and rules.rcp is not None and len(logs) >= rules.runs and len(batches) == 1:
        score = score_logs(logs, rules, folder=folder)
        if not score.test.passes:
            yield of_set("set-rcp", score.test.message)


def _seeds(logs: Sequence[RunLog]) -> Iterator[CheckFinding]:
    first: dict[str, str] = {}
    for log in logs:
        for record in log.all("seed"):
            seed = repr(record.value)
            if first.setdefault(seed, log.path.name) != log.path.name:
                yield CheckFinding(
                    file=log.path.name, line=record.line, rule="seed-repeated",
                    message=f"seed {seed:.40} stands in {first[seed]} too",
                )  # fmt: skip


def _copies(logs: Sequence[RunLog]) -> Iterator[CheckFinding]:
    """Times are compared from run_start on: a copy may have another date. Losses are compared in whole runs."""
    first: dict[tuple[object, ...], str] = {}
    for log in logs:
        start, evaluations = log.first("run_start"), log.all("eval_accuracy")
        times = [r.time_ms for r in log.all("run_start", "run_stop", "eval_accuracy")]
        marks: dict[str, tuple[object, ...]] = {}
        if start is not None and len(times) > 2:
            marks["times"] = ("times", *(time - start.time_ms for time in times))
        if len(evaluations) > 2:
            marks["losses"] = ("losses", *(repr(r.value) for r in evaluations))
        same = {what: first[mark] for what, mark in marks.items() if mark in first}
        if same:
            message = f"the {' and '.join(same)} stand in {next(iter(same.values()))} too"
            yield CheckFinding(file=log.path.name, line=None, rule="run-copied", message=message)
        for mark in marks.values():
            first.setdefault(mark, log.path.name)


def _sorted(found: list[CheckFinding]) -> list[CheckFinding]:
    """Errors first, then by file and line."""
    order = {name: i for i, name in enumerate(check_rules())}
    return sorted(found, key=lambda f: (f.severity != "error", f.file, f.line or 0, order[f.rule]))
