"""Results of checks, and the limits that they apply (data/limits.toml, data/findings.toml).

A limit is a share of the expected value, or an absolute number. Its entry gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import value_named
from meshwright.files import toml_table

DATA = Path(__file__).parent / "data"


class CheckStatus(StrEnum):
    """Status of a check, from good to bad. A check that could not read its inputs is skipped."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """Result of one check for one object. `where` names the device, card, folder or file."""

    check: str
    status: CheckStatus
    where: str = ""
    measured: float | str | None = None
    expected: float | str | None = None  # a value, or the limit that was applied
    unit: str = ""
    message: str = ""
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckLimit:
    """Bounds of good values. `of_expected`: the bounds are shares of the expected value."""

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
        """First bound that a value crosses from good to bad."""
        bounds = (self.warn_above, self.fail_above, self.warn_below, self.fail_below)
        return next(b for b in bounds if b is not None)

    @property
    def sign(self) -> str:
        """Sign of good values relative to the bound."""
        sides = (self.fail_below, self.warn_below), (self.warn_above, self.fail_above)
        is_low, is_high = (any(bound is not None for bound in side) for side in sides)
        return "±" if is_low and is_high else "≥" if is_low else "≤"

    def status_of(self, value: float) -> CheckStatus:
        """Return the status of a value, or of its share of the expected one."""
        if _is_below(value, self.fail_below) or _is_above(value, self.fail_above):
            return CheckStatus.FAIL
        if _is_below(value, self.warn_below) or _is_above(value, self.warn_above):
            return CheckStatus.WARN
        return CheckStatus.PASS


@cache
def limits() -> dict[str, CheckLimit]:
    """Return all entries of limits.toml by name."""
    return {name: CheckLimit(name=name, **entry) for name, entry in toml_table(DATA / "limits.toml").items()}


def judge(check: str, measured: float, *, expected: float | None = None, where: str = "") -> CheckVerdict:
    """Apply the limit with the check's name to a value. `expected` is needed when the limit is a share of it."""
    limit = value_named("limit", check, limits())
    share = measured
    message = ""
    if limit.of_expected:
        if not expected:
            raise ValueError(f"the limit {check} is a share of an expected value, and none was given")
        share = measured / expected
        message = f"{share:.0%} of the expected value"
    status = limit.status_of(share)
    return CheckVerdict(
        check=check, status=status, where=where, measured=measured, unit=limit.unit, message=message,
        expected=expected if limit.of_expected else limit.bound,
        hint=None if status is CheckStatus.PASS else limit.hint,
    )  # fmt: skip


def skipped(check: str, reason: str, *, where: str = "") -> CheckVerdict:
    """Return the verdict of a check that could not read its inputs."""
    return CheckVerdict(check=check, status=CheckStatus.SKIPPED, where=where, message=reason)


def found(check: str, status: CheckStatus | bool, message: str = "", **fields: Any) -> CheckVerdict:
    """Return a verdict without a limit. The hint is kept only if the check does not pass.

    `status`: True passes, False has the status `otherwise` of the check in data/findings.toml. `fields` of the
    verdict that are not given are those of that entry, if it has them.
    """
    entry: dict[str, Any] = {"hint": None, **toml_table(DATA / "findings.toml").get(check, {}), **fields}
    otherwise = CheckStatus(entry.pop("otherwise", CheckStatus.FAIL))
    if isinstance(status, bool):
        status = CheckStatus.PASS if status else otherwise
    if status is CheckStatus.PASS:
        entry["hint"] = None
    return CheckVerdict(check=check, status=status, message=message, **entry)


def _is_below(value: float, bound: float | None) -> bool:
    return bound is not None and value < bound


def _is_above(value: float, bound: float | None) -> bool:
    return bound is not None and value > bound
