"""The table of memory on CPUs says what its record says, and the record's predictions are those of the cost model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import cpu_memory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "memory.md"
RECORD = json.loads((ROOT / "benchmarks" / "records" / "cpu_memory.json").read_text(encoding="utf-8"))


def test_the_page_is_the_record():
    text = PAGE.read_text(encoding="utf-8")
    assert cpu_memory.page_with(text, RECORD) == text
    assert cpu_memory.page_with(f"a{cpu_memory.BEGIN}old{cpu_memory.END}z", RECORD).endswith("z")


def test_every_configuration_was_measured():
    assert [row["configuration"] for row in RECORD["rows"]] == list(cpu_memory.CONFIGURATIONS)


@pytest.mark.parametrize("row", RECORD["rows"], ids=lambda row: row["configuration"])
def test_the_model_predicts_what_the_record_says(row):
    """Measure again where the cost model changed: `python benchmarks/cpu_memory.py`."""
    found = cpu_memory.of_model_mib(cpu_memory.CONFIGURATIONS[row["configuration"]])
    assert found == pytest.approx(row["of_model_mib"], abs=1)


def test_a_table_counts_errors():
    rows = [
        {"configuration": "a", "measured_mib": 100, "predicted_mib": 95, "of_model_mib": 50},
        {"configuration": "b", "measured_mib": 1000, "predicted_mib": 1300, "of_model_mib": 900},
    ]
    lines = cpu_memory.table({"rows": rows, "device": "a processor"}).splitlines()
    assert "| b | 1,000 | 1,300 | 900 | +30 % |" in lines
    assert "18 % in the median and 30 % at most; 1 of 2 are at most 10 %" in lines[-1]
