"""Commands in the page of the run files that ship can be typed: every command of its table finds a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from meshwright import catalog

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "shipped-runs.md"
SAID = re.findall(r"^\|.*\| `meshwright (plan .*)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("words", SAID)
def test_what_the_documents_have_is_said_in_one_command(words, meshwright):
    outcome = meshwright(*shlex.split(words), "--top", "1", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["plans"][0]["estimate"]["step"]["value"] > 0


def test_the_table_has_all_of_them():
    assert {shlex.split(words)[1] for words in SAID} == {*catalog.run_file_names()}
