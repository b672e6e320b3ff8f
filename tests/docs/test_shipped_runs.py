"""Commands in the page of the run files that ship can be typed: every command of its table finds a plan."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from meshwright.catalog import lookup as catalog

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "shipped-runs.md"
SAID = re.findall(r"^\|.*\| `meshwright (plan .*)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("words", SAID)
def test_what_the_documents_have_is_said_in_one_command(words, meshwright):
    outcome = meshwright(*shlex.split(words), "--top", "1", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["plans"][0]["estimate"]["step"]["value"] > 0


def test_the_table_has_all_of_them():
    assert {shlex.split(words)[1] for words in SAID} == {*catalog.run_file_names()}


TABLE = PAGE.read_text(encoding="utf-8").partition("$ meshwright catalog runs --predict\n")[2].partition("```")[0]
NAME = "|".join(sorted(map(re.escape, catalog.run_file_names()), key=len, reverse=True))
ROW = rf"^({NAME})(?= |$)(.*\n(?:(?!(?:{NAME})(?: |$)).*\n)*)"
PREDICTED = dict(re.findall(ROW, TABLE.partition("─\n")[2], re.MULTILINE))
"""Rows of the page's table by run file."""
FAST = ("llama2-70b-lora", "llama3-8b", "mixtral-8x7b")
"""Adapters, a dense model and a mixture of experts; the native engine and Megatron."""


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in catalog.run_file_names()]
)
def test_the_predictions_are_those_of_the_command(name, meshwright):
    """A table of one run has other widths than that of all: the same words, in lines of other lengths."""
    outcome = meshwright("catalog", "runs", name, "--predict")
    assert outcome.exit_code == 0, outcome.stderr
    rows = outcome.stdout.rpartition(f"\n{name}")[2]
    assert Counter(rows.split()) == Counter(PREDICTED[name].split())


def test_the_predictions_are_of_all_of_them():
    assert PREDICTED.keys() == {*catalog.run_file_names()}
