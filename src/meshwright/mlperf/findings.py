"""Findings of `meshwright mlperf check`, and the table of its rules (`data/check_rules.toml`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.files import toml_table
from meshwright.json_values import picked
from meshwright.mlperf.benchmarks import DATA
from meshwright.mlperf.log import LogRecord, RunLog


@dataclass(frozen=True, kw_only=True)
class CheckRule:
    """One rule."""

    rule: str
    severity: str  # error, warning
    demands: str
    why: str
    fix: str
    official: bool = False  # the official checkers find it too


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One rule that a log breaks. `line` is None where something is absent or the finding is of the whole set."""

    file: str
    line: int | None
    rule: str
    message: str  # what was got, and what is allowed

    @property
    def severity(self) -> str:
        return check_rules()[self.rule].severity

    @property
    def why(self) -> str:
        return check_rules()[self.rule].why

    @property
    def fix(self) -> str:
        return check_rules()[self.rule].fix

    def as_row(self) -> dict[str, Any]:
        """Return file, line, rule, severity, message, why and fix."""
        return picked(self, "file", "line", "rule", "severity", "message", "why", "fix")


def finding(log: RunLog, rule: str, message: str, record: LogRecord | None = None) -> CheckFinding:
    """The finding at a record of a log, or of the whole log."""
    line = None if record is None else record.line
    return CheckFinding(file=log.path.name, line=line, rule=rule, message=message)


@cache
def check_rules() -> dict[str, CheckRule]:
    """All rules by id."""
    return {rule: CheckRule(rule=rule, **row) for rule, row in toml_table(DATA / "check_rules.toml").items()}
