"""Rules of one log about time: order of the phases, direction of the clock, pairs, rates of blocks and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.findings import CheckFinding, finding
from meshwright.mlperf.log import LogRecord, RunLog

PHASES = ("init_start", "init_stop", "run_start", "run_stop")
PAIRS = ("block", "epoch", "eval")
_EARLIEST_MS, _LATEST_MS = 1.4e12, 4.1e12  # 2014 to 2099
_SHUFFLED_MS = 1000.0  # ranks of one job disagree by less
_FACTOR = 2.0  # seconds per sample beside the median; a change of precision within a run stays below
_GAP_MS = 1000.0  # between init_stop and run_start; published runs have 0 to 18 ms
_INSTANT_S = 0.001
_NOISE_S = 1.0  # a shared machine delays an interval by this much


def clock_findings(log: RunLog, rules: Benchmark) -> Iterator[CheckFinding]:
    """Findings about time."""
    wrong = next((r for r in log.records if not _EARLIEST_MS < r.time_ms < _LATEST_MS), None)
    if wrong is not None:
        yield finding(log, "clock-unit", f"time_ms is {wrong.time_ms:g}", wrong)
    yield from _order(log)
    yield from _direction(log)
    starts, stop = log.all("init_start"), log.first("init_stop")
    division = log.value("submission_division")
    limits = rules.rules.initialization_minutes
    limit = limits.get(division, limits["closed"]) if isinstance(division, str) else limits["closed"]
    if starts and stop is not None:
        minutes = (stop.time_ms - min(s.time_ms for s in starts)) / 60_000
        if minutes >= limit:
            yield finding(log, "init-limit", f"{minutes:.1f} minutes, the limit is {limit:g}", stop)
    yield from _pairs(log)
    yield from _outside(log)
    yield from _rates(log)


def blocks(log: RunLog, name: str) -> list[tuple[LogRecord, LogRecord]]:
    """Start and stop of each interval `name`: block, epoch or eval."""
    found, start = [], None
    for record in log.all(f"{name}_start", f"{name}_stop"):
        if record.key.endswith("_start"):
            start = record
        elif start is not None:
            found.append((start, record))
            start = None
    return found


def _order(log: RunLog) -> Iterator[CheckFinding]:
    """The last init_start may be of a later rank; the first counts for the limit, all stand before init_stop."""
    seen = [
        (name, record)
        for name in PHASES
        if (record := log.last(name) if name == "init_start" else log.first(name)) is not None
    ]
    for (before, first), (after, second) in itertools.pairwise(seen):
        if second.line < first.line:
            yield finding(log, "order", f"{after} stands before {before} (line {first.line})", second)
        elif second.time_ms < first.time_ms:
            earlier = (first.time_ms - second.time_ms) / 1000
            yield finding(log, "order", f"{after} is {earlier:.3f} s earlier than {before}", second)
    for key in ("init_stop", "run_start", "run_stop"):
        if len(found := log.all(key)) > 1:
            yield finding(log, "phase-repeated", f"{key} has {len(found)} records", found[1])
    start, stop = log.first("run_start"), log.first("run_stop")
    ready, cleared = log.first("init_stop"), log.first("cache_clear")
    if ready is not None and start is not None and start.time_ms - ready.time_ms > _GAP_MS:
        gap = (start.time_ms - ready.time_ms) / 1000
        yield finding(log, "init-gap", f"run_start is {gap:.3f} s later than init_stop", start)
    if cleared is not None and start is not None and cleared.line > start.line:
        message = f"cache_clear stands after run_start (line {start.line})"
        yield finding(log, "cache-clear", message, cleared)
    if start is not None and stop is not None and stop.time_ms == start.time_ms:
        yield finding(log, "order", "run_start and run_stop have the same time", stop)


def _direction(log: RunLog) -> Iterator[CheckFinding]:
    """Ranks that write cache_clear and init_start interleave; the run itself is one rank's."""
    latest: LogRecord | None = None
    shuffled: list[LogRecord] = []
    for record in log.records:
        if record.key in ("cache_clear", "init_start"):
            continue
        if latest is not None and record.time_ms < latest.time_ms:
            back = latest.time_ms - record.time_ms
            if back > _SHUFFLED_MS:
                message = f"{record.key} is {back / 1000:.1f} s earlier than {latest.key} of line {latest.line}"
                yield finding(log, "clock-backward", message, record)
                latest = record
            else:
                shuffled.append(record)
        else:
            latest = record
    if shuffled:
        message = f"{len(shuffled)} records are up to a second earlier than one before them"
        yield finding(log, "clock-shuffled", message, shuffled[0])


def _pairs(log: RunLog) -> Iterator[CheckFinding]:
    finished = log.finished
    for name in PAIRS:
        start: LogRecord | None = None
        rule = "pairs" if name == "eval" else "pairs-blocks"
        for record in log.all(f"{name}_start", f"{name}_stop"):
            if record.key.endswith("_start"):
                if start is not None:
                    yield finding(log, rule, f"{name}_start without {name}_stop before the next one", start)
                start = record
            elif start is None:
                yield finding(log, rule, f"{name}_stop without {name}_start", record)
            else:
                start = None
        # a run may end within a block or an epoch, and a log that is being written anywhere
        if start is not None and finished and name == "eval":
            yield finding(log, "pairs", "eval_start without eval_stop before the end of the run", start)
    if finished and log.all("eval_accuracy") and not log.all("eval_start", "eval_stop"):
        yield finding(log, "pairs-absent", "no eval_start and no eval_stop", log.first("eval_accuracy"))


def _outside(log: RunLog) -> Iterator[CheckFinding]:
    start, stop = log.first("run_start"), log.first("run_stop")
    keys = ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy", "epoch_start", "epoch_stop")
    for record in log.all(*keys):
        if start is not None and record.line < start.line:
            yield finding(log, "eval-outside", f"{record.key} stands before run_start (line {start.line})", record)
            return
        if stop is not None and record.line > stop.line and record.key not in ("epoch_stop", "block_stop"):
            yield finding(log, "eval-outside", f"{record.key} stands after run_stop (line {stop.line})", record)
            return


def _rates(log: RunLog) -> Iterator[CheckFinding]:
    """Blocks by seconds per sample, the samples being those between the evaluations that enclose them."""
    ends = [r for r in log.all("eval_start", "eval_accuracy") if r.samples is not None]
    rated: list[tuple[LogRecord, float]] = []
    counts: list[float] = []
    before = 0.0
    for start, stop in blocks(log, "block"):
        end = next((r.samples for r in ends if r.line > stop.line and r.samples is not None), None)
        if end is None or end <= before:
            continue
        rated.append((stop, (stop.time_ms - start.time_ms) / 1000 / (end - before)))
        counts.append(end - before)
        before = end
    for number in _outliers([rate for _, rate in rated], noises=[_NOISE_S / count for count in counts]):
        yield _rate_finding(log, "block-rate", rated, number, unit="s per sample")
    durations = [(stop, (stop.time_ms - start.time_ms) / 1000) for start, stop in blocks(log, "eval")]
    seconds = [duration for _, duration in durations]
    if instant := [stop for stop, duration in durations if 0.0 <= duration <= _INSTANT_S]:
        yield finding(
            log, "eval-instant", f"{len(instant)} of {len(seconds)} evaluations take 1 ms or less", instant[0]
        )
    paced = [duration / _pace(rated, stop) for stop, duration in durations]
    odd = _outliers(paced, noises=[0.0] * len(paced))
    for number in _outliers(seconds, noises=[_NOISE_S] * len(seconds)):
        if number in odd:  # a machine that is shared slows the block before it as well
            yield _rate_finding(log, "eval-rate", durations, number, unit="s")


def _pace(rated: list[tuple[LogRecord, float]], record: LogRecord) -> float:
    """Seconds per sample of the last block before `record`; 1 without one."""
    return next((rate for stop, rate in reversed(rated) if stop.line < record.line and rate > 0), 1.0)


def _outliers(values: list[float], *, noises: list[float]) -> list[int]:
    """Numbers of the values that are a factor and more than their noise off the median."""
    if len(values) < 3:
        return []
    middle = median(values)
    found = []
    for number, (value, noise) in enumerate(zip(values, noises, strict=True)):
        slow = value > _FACTOR * middle and number > 0  # the first may compile or fill caches
        if middle > 0 and abs(value - middle) > noise and (slow or value < middle / _FACTOR):
            found.append(number)
    return found


def _rate_finding(
    log: RunLog, rule: str, rated: list[tuple[LogRecord, float]], number: int, *, unit: str
) -> CheckFinding:
    record, value = rated[number]
    return finding(log, rule, f"{value:.4g} {unit}, the median is {median(v for _, v in rated):.4g}", record)
