"""The page of rules is the one that the data give."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_page_of_rules_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("mlperf_rules", ROOT / "scripts" / "mlperf_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    page = (ROOT / "docs" / "reference" / "mlperf-rules.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, (
        "run: python scripts/mlperf_rules.py > docs/reference/mlperf-rules.md"
    )
