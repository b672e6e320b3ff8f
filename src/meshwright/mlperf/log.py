"""Result files: one `:::MLLOG {json}` record a line, among other output of the processes.

Read as the official parser reads them: latin-1, text before the last token of a line is dropped, lines without a token
are no records. A line on which the official parser fails, or which it drops in silence, is a `LogFault`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

TOKEN = ":::MLLOG "
_BARE_TOKEN = TOKEN.strip()


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One record. `line` counts from 1 in the file; `time_ms` is milliseconds of the clock of the process."""

    line: int
    time_ms: float
    event: str
    key: str
    value: Any
    metadata: dict[str, Any]

    @property
    def samples(self) -> float | None:
        """Samples of the metadata, or the epoch number of logs that give no samples; None without a number."""
        for key in ("samples_count", "epoch_num"):
            count = self.metadata.get(key)
            if isinstance(count, (int, float)) and not isinstance(count, bool) and _finite(count):
                return count
        return None


@dataclass(frozen=True, kw_only=True)
class LogFault:
    """A line that holds a token and no record that the official tools read."""

    line: int
    problem: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """All records of one result file, in the order of the file."""

    path: Path
    records: tuple[LogRecord, ...]
    faults: tuple[LogFault, ...] = ()
    num_lines: int = 0

    @cached_property
    def by_key(self) -> dict[str, list[LogRecord]]:
        """Records by key, each in the order of the file."""
        found: dict[str, list[LogRecord]] = {}
        for record in self.records:
            found.setdefault(record.key, []).append(record)
        return found

    def all(self, *keys: str) -> list[LogRecord]:
        """Records of these keys, in the order of the file."""
        if len(keys) == 1:
            return self.by_key.get(keys[0], [])
        return [r for r in self.records if r.key in keys]

    def first(self, key: str) -> LogRecord | None:
        """First record of a key."""
        found = self.by_key.get(key)
        return found[0] if found else None

    def last(self, key: str) -> LogRecord | None:
        """Last record of a key."""
        found = self.by_key.get(key)
        return found[-1] if found else None

    def value(self, key: str) -> Any:
        """Value of the last record of a key; None without one."""
        found = self.last(key)
        return None if found is None else found.value

    @property
    def finished(self) -> bool:
        """True once the log holds run_stop."""
        return self.last("run_stop") is not None


def read_log(path: Path) -> RunLog:
    """Return the records of a result file; raises InputError if it cannot be opened."""
    try:
        with path.open(encoding="latin-1") as lines:
            return parse_log(lines, path=path)
    except OSError as error:
        raise InputError(f"{path}: result file cannot be read: {error.strerror or error}") from error


def parse_log(lines: Iterable[str], *, path: Path = Path("log")) -> RunLog:
    """Return the records of `lines`.

    >>> log = parse_log(['rank 0: :::MLLOG {"time_ms": 1, "key": "seed", "value": 7, "metadata": {}}', "step 1"])
    >>> log.value("seed"), len(log.faults)
    (7, 0)
    """
    records: list[LogRecord] = []
    faults: list[LogFault] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        if _BARE_TOKEN not in line:
            continue

        def fault(problem: str, text: str = line, number: int = number) -> None:
            faults.append(LogFault(line=number, problem=problem, text=text.strip()[:200]))

        start = line.rfind(TOKEN)
        if start < 0:
            fault("no space follows the token, so the official tools ignore the line")
            continue
        if line.count(TOKEN) > 1:
            fault("several records on one line: the official tools read the last alone")
        record = _record(line[start + len(TOKEN) :].strip(), number, fault)
        if record is not None:
            records.append(record)
    return RunLog(path=path, records=tuple(records), faults=tuple(faults), num_lines=number)


def _record(text: str, line: int, fault: Callable[[str], None]) -> LogRecord | None:
    doubled: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            doubled.extend(sorted({name for name in names if names.count(name) > 1}))
        return found

    try:
        row = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        fault(f"the record is not JSON: {error}")
        return None
    if not isinstance(row, dict):
        fault("the record is JSON, and no object")
        return None
    missing = [k for k in ("time_ms", "key", "value", "metadata") if k not in row]
    if missing:
        fault(f"the record lacks {', '.join(missing)}")
        return None
    if doubled:
        fault(f"the record has {doubled[0][:40]} twice: tools differ in which they read")
        return None
    try:
        time_ms = math.nan if isinstance(row["time_ms"], str | bool) else float(row["time_ms"])
    except (TypeError, ValueError, OverflowError):
        time_ms = math.nan
    if not _finite(time_ms):
        fault("time_ms is no finite number")
        return None
    if not isinstance(row["key"], str) or not isinstance(row["metadata"], dict):
        fault("key must be a string and metadata an object")
        return None
    return LogRecord(
        line=line,
        time_ms=time_ms,
        event=str(row.get("event_type", "")),
        key=row["key"],
        value=row["value"],
        metadata=row["metadata"],
    )


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
