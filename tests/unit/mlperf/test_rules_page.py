"""The page of rules is the one that the data give."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import mlperf_rules

ROOT = Path(__file__).parents[3]


def test_the_page_of_rules_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    mlperf_rules.main()
    page = (ROOT / "docs" / "reference" / "mlperf-rules.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "run: python scripts/mlperf_rules.py > docs/reference/mlperf-rules.md"
