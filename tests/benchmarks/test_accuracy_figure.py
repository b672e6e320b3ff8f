"""The README's figure: every point lies inside its frame, the worst ones carry names."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import accuracy_figure

ROOT = Path(__file__).parents[2]


def test_every_point_of_the_committed_record_lies_inside_the_frame():
    rows = json.loads((ROOT / accuracy_figure.RECORD).read_text())["rows"]
    low, high = accuracy_figure.limits(rows)
    assert all(low < row[key] < high for row in rows for key in ("measured", "predicted"))
    assert all(low <= tick <= high for tick in accuracy_figure.decades((low, high)))
    text = (ROOT / "docs" / "images" / "predicted-and-measured.svg").read_text()
    assert text.count('aria-roledescription="circle"') == len(rows)


def test_the_largest_errors_carry_their_names_once():
    rows = [{"measured": 100.0, "predicted": 100.0 * f, "name": n} for f, n in ((5, "a"), (4, "a"), (3, "b"), (1, "c"))]
    assert [r["label"] for r in accuracy_figure.labelled(rows)] == ["a", "", "b", "c"]
