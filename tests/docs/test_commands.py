"""The reference of all commands is what the declarations say."""

from __future__ import annotations

import re

from scripts import renew_commands

from meshwright.cli.main import VERBS


def test_the_page_is_up_to_date():
    assert renew_commands.PAGE.read_text(encoding="utf-8") == renew_commands.page(), "run scripts/renew_commands.py"


def test_the_page_has_every_command_under_its_task():
    headings = re.findall(r"^#{2,4} (.+)$", renew_commands.page(), re.MULTILINE)
    for name, verb in VERBS.items():
        assert headings.index(verb.section) < headings.index(name)
    assert {"bench device", "tune gemm"} <= set(headings)


def test_no_table_has_an_escaped_pipe():
    """GitHub shows `a\\|b` as a|b, the site shows its backslash, and an unescaped pipe ends the cell on GitHub."""
    pages = renew_commands.PAGE.parents[1].rglob("*.md")
    rows = [f"{page.name}: {line}" for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if "\\|" in row] == []
