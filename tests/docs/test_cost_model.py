"""The page of the cost model keeps step with the code."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.calibration.parameters import Parameter, prior

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "cost-model.md"
ROW = re.compile(r"^\| `(?P<names>[^|]+)` \|", re.MULTILINE)


def line(p: Parameter) -> str:
    """One row of the table of parameters."""
    return f"| `{p.name}` | {p.prior:g} | {', '.join(p.levels) or 'nothing'} | {p.meaning} |"


def section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_parameters_is_that_of_the_file():
    table = [row for row in section("Calibration").splitlines() if row.startswith("| `")]
    assert table == [line(p) for p in prior().parameters.values()]


def test_every_component_is_explained():
    example = re.search(r"\n\['[^\]]+\]", PAGE.read_text(encoding="utf-8"))
    assert example is not None
    components = set(re.findall(r"'(\w+)'", example.group()))
    explained = {n for row in ROW.findall(section("Components")) for n in re.findall(r"\w+", row)}
    assert components == explained


def test_parameters_in_the_text_exist():
    named = set(re.findall(r"`(\w+_(?:ratio|s|factor|passes|doubling|year))`", PAGE.read_text(encoding="utf-8")))
    assert named <= set(prior().parameters)
