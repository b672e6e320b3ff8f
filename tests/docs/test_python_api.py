"""The pages of the Python API have every public name, every argument and every member."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.result import Result

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("python-api*.md"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
FUNCTIONS = [n for n in mw.__all__ if inspect.isfunction(getattr(mw, n))]
CLASSES = [n for n in mw.__all__ if inspect.isclass(getattr(mw, n)) and issubclass(getattr(mw, n), Result)]
SHARED = {"to_dict", "to_frame", "to_rows", "summary", "write_html"}


def section(name: str) -> str:
    """Text under the heading that names `name`, subsections included."""
    found = re.search(rf"^(##+) [^\n]*\b{name}\b[^\n]*\n(.*?)(?=^##? |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[2]


def code(text: str) -> set[str]:
    """Identifiers in code."""
    return {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", span)}


@pytest.mark.parametrize("name", mw.__all__)
def test_every_public_name_is_there(name):
    assert name in code(PAGE) | set(re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_there(name):
    assert set(inspect.signature(getattr(mw, name)).parameters) - code(section(name)) == set()


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_is_there(name):
    public = {n for n in [*dir(getattr(mw, name)), *inspect.get_annotations(getattr(mw, name))] if n[0] != "_"}
    text = section(name) or section("read_record")
    assert public - SHARED - code(text) == set()
