"""The map of packages is what the source says, and every package has a first line."""

from __future__ import annotations

import re

from scripts import renew_map

WALK = renew_map.ROOT / "docs" / "guides" / "code-walk.md"


def test_the_page_is_up_to_date():
    assert renew_map.PAGE.read_text(encoding="utf-8") == renew_map.page(), "run scripts/renew_map.py"


def test_every_package_says_what_it_holds():
    lines = [line.split("|") for line in renew_map.page().splitlines() if line.startswith("| ")][2:]
    assert sum(map(len, renew_map.layers())) == len(lines)
    assert all(cells[3].strip() for cells in lines)


def test_the_walk_names_files_that_are_there():
    named = re.findall(r"`((?:\w+/)+[\w.*]*|\w+/\w[\w/]*)`", WALK.read_text(encoding="utf-8"))
    below = (renew_map.PACKAGE, renew_map.ROOT)
    assert len(named) > 40
    assert [path for path in named if not any(any(folder.glob(path.rstrip("/"))) for folder in below)] == []
