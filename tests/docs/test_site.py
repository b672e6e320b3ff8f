"""The documentation builds as a site: strict, complete, searchable, and without anything from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+\"")
CANONICAL = re.compile(r"<link\b[^>]*rel=\"(?:canonical|edit)\"[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", "mkdocs.yml", "--strict", "--site-dir", folder],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if page != "index.html" and f'href="{page}"' not in home] == []


@pytest.mark.parametrize("term", ["gradient checkpointing", "microbatch", "MFU", "ZeRO-3", "--explain"])
def test_the_search_finds(site, term):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(term in entry["text"] or term in entry["title"] for entry in index["docs"])


def test_pages_load_nothing_from_elsewhere(site):
    loaded = {
        page.name: found
        for page in site.rglob("*.html")
        if (found := ELSEWHERE.findall(CANONICAL.sub("", page.read_text(encoding="utf-8"))))
    }
    assert loaded == {}
