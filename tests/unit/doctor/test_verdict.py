"""Verdicts of checks without a limit."""

from __future__ import annotations

from meshwright.doctor.verdict import DATA, CheckStatus, found
from meshwright.files import toml_table


def test_every_entry_has_a_hint_for_those_that_do_not_pass() -> None:
    for name in toml_table(DATA / "findings.toml"):
        failed, passed = found(name, False), found(name, True)
        assert failed.hint
        assert failed.status in (CheckStatus.WARN, CheckStatus.FAIL)
        assert (passed.status, passed.hint) == (CheckStatus.PASS, None)


def test_what_a_check_says_itself_comes_before_its_entry() -> None:
    verdict = found("memory.errors", CheckStatus.WARN, "why", expected=3, hint="how")
    assert (verdict.status, verdict.expected, verdict.hint) == (CheckStatus.WARN, 3, "how")
    assert verdict.unit == "uncorrected"
