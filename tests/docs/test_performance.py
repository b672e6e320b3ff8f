"""The page of performance says what the records say, and no record is much younger or older than its commit."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import performance

RECORDS = {name: performance.RECORDS / f"{name}.json" for _, name, _, _ in performance.SUBJECTS.values()}


def test_the_page_is_the_records():
    assert performance.measured_part() in performance.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_the_commit_that_it_names(name):
    record = json.loads(RECORDS[name].read_text(encoding="utf-8"))
    try:
        days = performance.days_behind(record)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of the repository is not here")
    assert 0 <= days <= performance.DAYS


def test_an_old_measurement_is_seen(monkeypatch):
    class Shown:
        stdout = "2026-11-01\n"

    monkeypatch.setattr(performance.subprocess, "run", lambda *given, **more: Shown)
    assert performance.days_behind({"date": "2026-11-09", "git_commit": "abc+"}) == 8
