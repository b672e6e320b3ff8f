"""What a check answers, and the limits that it judges by (data/limits.toml).

A limit is a share of the value expected of that very thing, or a number of its own. Its entry says why it lies there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.errors import UnknownNameError


class CheckStatus(StrEnum):
    """From good to bad; a check that could not look is skipped."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """One answer about one thing: `check` names the question, `where` the device, card, folder or file."""

    check: str
    status: CheckStatus
    where: str = ""
    measured: float | str | None = None
    expected: float | str | None = None  # a value, or the limit that it was judged by
    unit: str = ""
    message: str = ""
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckLimit:
    """Where a value is no longer good. `of_expected`: the bounds are shares of the expected value."""

    name: str
    unit: str
    source: str
    hint: str | None = None
    of_expected: bool = False
    fail_below: float | None = None
    warn_below: float | None = None
    warn_above: float | None = None
    fail_above: float | None = None

    @property
    def bound(self) -> float:
        """The first bound that a value crosses on its way from good to bad."""
        bounds = (self.warn_below, self.fail_below, self.warn_above, self.fail_above)
        return next(b for b in bounds if b is not None)

    @property
    def sign(self) -> str:
        """On which side of the bound a value is good."""
        return "≥" if self.warn_below is not None or self.fail_below is not None else "≤"

    def status_of(self, value: float) -> CheckStatus:
        """What a value, or a share of the expected one, is worth."""
        if _is_below(value, self.fail_below) or _is_above(value, self.fail_above):
            return CheckStatus.FAIL
        if _is_below(value, self.warn_below) or _is_above(value, self.warn_above):
            return CheckStatus.WARN
        return CheckStatus.PASS


@cache
def limits() -> dict[str, CheckLimit]:
    """All entries of limits.toml by name."""
    text = (files("meshwright.doctor") / "data" / "limits.toml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {name: CheckLimit(name=name, **entry) for name, entry in entries.items()}


def judge(check: str, measured: float, *, expected: float | None = None, where: str = "") -> CheckVerdict:
    """Judge a value by the limit of the check's name; `expected` where the limit is a share of it."""
    if check not in limits():
        raise UnknownNameError("limit", check, known=limits())
    limit = limits()[check]
    share = measured
    message = ""
    if limit.of_expected:
        if not expected:
            raise ValueError(f"the limit {check} is a share of an expected value, and none was given")
        share = measured / expected
        message = f"{share:.0%} of what is expected"
    status = limit.status_of(share)
    return CheckVerdict(
        check=check, status=status, where=where, measured=measured, unit=limit.unit, message=message,
        expected=expected if limit.of_expected else limit.bound,
        hint=None if status is CheckStatus.PASS else limit.hint,
    )  # fmt: skip


def skipped(check: str, reason: str, *, where: str = "") -> CheckVerdict:
    """A check that could not look, and why."""
    return CheckVerdict(check=check, status=CheckStatus.SKIPPED, where=where, message=reason)


def found(
    check: str, status: CheckStatus, message: str = "", *, where: str = "", measured: float | str | None = None,
    expected: float | str | None = None, unit: str = "", hint: str | None = None,
) -> CheckVerdict:  # fmt: skip
    """A verdict that no limit decides; the hint is kept only when something is wrong."""
    return CheckVerdict(
        check=check, status=status, where=where, measured=measured, expected=expected, unit=unit, message=message,
        hint=None if status is CheckStatus.PASS else hint,
    )  # fmt: skip


def _is_below(value: float, bound: float | None) -> bool:
    return bound is not None and value < bound


def _is_above(value: float, bound: float | None) -> bool:
    return bound is not None and value > bound
