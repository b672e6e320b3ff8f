"""Rules of one log about evaluations: their places, their samples, the one that ends the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.findings import CheckFinding, finding
from meshwright.mlperf.formulas import is_number
from meshwright.mlperf.log import LogRecord, RunLog


@dataclass(frozen=True, kw_only=True)
class LoggedEvaluation:
    """One evaluation. `place` is the count of consumed samples, `logged` what eval_accuracy says."""

    record: LogRecord
    place: float | None
    logged: float | None


def evaluation_findings(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    """Findings about evaluations of a closed run."""
    batch = global_batch(log)
    found = logged_evaluations(log)
    yield from _values(log, found)
    yield from _counts(log, found, batch)
    if batch is not None:
        places = _corrected(found, rules, batch)
        first = next((each for each in found if each.place is not None), None)  # others state no count
        if first is not None and places[0][1] != first.place:
            message = f"all {len(places)}: {first.place:g} where the cadence has {places[0][1]:g}"
            yield finding(log, "samples-one-batch-low", message, first.record)
        yield from _cadence(log, places, rules, batch)
        for key in ("max_steps", "opt_learning_rate_training_steps"):
            record = log.last(key)
            if record is None or not is_number(record.value) or not places:
                continue
            steps = places[-1][1] / batch
            if steps > record.value:
                yield finding(log, "steps-beyond-schedule", f"{steps:,.0f} steps, {key} is {record.value:,.0f}", record)
    yield from _target(log, found, rules)
    stop = log.first("run_stop")
    if stop is not None and stop.metadata.get("status") != "success":
        yield finding(log, "status", f"status is {stop.metadata.get('status')!r:.60}", stop)


def global_batch(log: RunLog) -> int | None:
    """Global batch size of a log; None if it holds no positive whole number."""
    value = log.value("global_batch_size")
    return int(value) if is_number(value) and value >= 1 and value == int(value) else None


def logged_evaluations(log: RunLog) -> list[LoggedEvaluation]:
    """All evaluations in order, without repeats of one count and value."""
    found: list[LoggedEvaluation] = []
    start: LogRecord | None = None
    for record in log.all("eval_start", "eval_accuracy"):
        if record.key == "eval_start":
            start = record
            continue
        if found and found[-1].logged == record.samples and found[-1].record.value == record.value:
            continue
        place = record.samples if start is None or start.samples is None else start.samples
        found.append(LoggedEvaluation(record=record, place=place, logged=record.samples))
        start = None
    return found


def _values(log: RunLog, found: list[LoggedEvaluation]) -> Iterator[CheckFinding]:
    for each in found:
        value = each.record.value
        if not is_number(value) or value <= 0:
            yield finding(log, "eval-value", f"got {value!r:.80}", each.record)
    if len(log.all("eval_accuracy")) > len(found):
        yield finding(log, "eval-repeated", f"{len(log.all('eval_accuracy'))} records of {len(found)} evaluations")


def _counts(log: RunLog, found: list[LoggedEvaluation], batch: int | None) -> Iterator[CheckFinding]:
    absent = [e for e in found if e.logged is None]
    if absent:
        yield finding(log, "samples-missing", f"{len(absent)} evaluations have no samples_count", absent[0].record)
    epochs = [e for e in found if e.logged is not None and "samples_count" not in e.record.metadata]
    if epochs:
        yield finding(log, "samples-in-epochs", f"{len(epochs)} evaluations have epoch_num alone", epochs[0].record)
    low = [e for e in found if e.logged is not None and e.place is not None and e.place - e.logged == batch]
    if low:
        each = low[0]
        message = f"{len(low)} of {len(found)} evaluations: {each.logged:g} where eval_start has {each.place:g}"
        yield finding(log, "samples-one-batch-low", message, each.record)
    other = [e for e in found if e.logged is not None and e.place not in (None, e.logged) and e not in low]
    if other:
        each = other[0]
        message = f"{len(other)} of {len(found)} evaluations: {each.logged:g} where eval_start has {each.place:g}"
        yield finding(log, "samples-disagree", message, each.record)
    for before, after in itertools.pairwise(found):
        if before.logged is not None and after.logged is not None and after.logged <= before.logged:
            yield finding(log, "samples-monotone", f"{after.logged:g} after {before.logged:g}", after.record)
    for each in found:
        if batch is not None and each.logged is not None and each.logged % batch:
            message = f"{each.logged:g} is no multiple of the global batch size {batch}"
            yield finding(log, "samples-batch", message, each.record)
            break
    stop, last = log.first("run_stop"), found[-1] if found else None
    counts = () if last is None or last.place is None else (last.place, last.logged)
    if stop is not None and stop.samples is not None and counts and stop.samples not in counts:
        yield finding(log, "stop-samples", f"run_stop has {stop.samples:g}, the last evaluation {counts[0]:g}", stop)


def _corrected(found: list[LoggedEvaluation], rules: Benchmark, batch: int) -> list[tuple[LogRecord, float]]:
    """Records and places. Counts that all are one batch below the cadence, without eval_start, are raised by it."""
    places = [(e.record, e.place) for e in found if e.place is not None]
    try:
        first, interval = rules.first_evaluation(batch), rules.interval(batch)
    except InputError:
        return places
    if len(places) > 1 and all(e.place == e.logged for e in found) and interval > batch:
        expected = [first + i * interval - batch for i in range(len(places))]
        if [p for _, p in places] == expected:
            return [(record, place + batch) for record, place in places]
    return places


def _cadence(
    log: RunLog, places: list[tuple[LogRecord, float]], rules: Benchmark, batch: int
) -> Iterator[CheckFinding]:
    try:
        first, interval = rules.first_evaluation(batch), rules.interval(batch)
    except InputError as error:
        yield finding(log, "hyperparameter", f"global_batch_size {batch}: {error.message}")
        return
    if not places:
        return
    if rules.evaluation.first_is_open:
        first = max(interval, int(places[0][1] // interval) * interval)
    if places[0][1] != first:
        skipped = rules.skipped(batch)
        skip = f", the first {skipped} skipped" if skipped else ""
        message = f"first at {places[0][1]:,.0f}, the rules say {first:,} (every {interval:,}{skip})"
        yield finding(log, "cadence-first", message, places[0][0])
    steps = [(record, after - before) for (_, before), (record, after) in itertools.pairwise(places)]
    wrong = [(record, step) for record, step in steps if step != interval]
    if wrong:
        got = ", ".join(f"{step:,.0f}" for step in sorted({step for _, step in wrong})[:4])
        message = f"{len(wrong)} of {len(steps)} intervals are {got}; the rules say {interval:,} at batch size {batch}"
        yield finding(log, "cadence-interval", message, wrong[0][0])


def _target(log: RunLog, found: list[LoggedEvaluation], rules: Benchmark) -> Iterator[CheckFinding]:
    met = [e for e in found if is_number(e.record.value) and rules.reached(e.record.value)]
    last = found[-1] if found else None
    stop = log.first("run_stop")
    if stop is not None and (last is None or last not in met):
        got = "no evaluation" if last is None else f"the last evaluation is {last.record.value!r:.40}"
        yield finding(log, "target", f"{got}; the target is {rules.target:g}", last.record if last else stop)
    early = [e for e in met if e is not last]
    if early:
        each = early[0]
        later = len(found) - found.index(each) - 1
        where = f"{each.record.value:g} at {each.place or 0:,.0f} samples met {rules.target:g}"
        message = f"{where}; {later} evaluations follow"
        yield finding(log, "target-first", message, each.record)
    logged = log.last("target_accuracy")
    if logged is not None and is_number(logged.value) and abs(logged.value - rules.target) > 1e-9:
        yield finding(log, "target-logged", f"{logged.value:g}, the rules say {rules.target:g}", logged)
