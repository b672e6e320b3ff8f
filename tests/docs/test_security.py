"""SECURITY.md and the table of faults name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_tests_that_exist():
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert named, row
        for name in named:
            assert "def test_" in (ROOT / name).read_text(), name


def test_every_fault_names_tests_that_exist():
    text = (ROOT / "docs" / "guides" / "checkpoints-and-faults.md").read_text().partition("| fault | where |")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/.]+)`", row.rsplit("|", 2)[1])
        assert named, row
        for name in named:
            place = ROOT / "tests" / name
            files = place.rglob("test_*.py") if place.is_dir() else [place]
            assert any("def test_" in file.read_text() for file in files), name
