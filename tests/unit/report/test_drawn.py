"""The table of what draws each answer."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import meshwright as mw
import meshwright.report
from meshwright.report.drawn import NOTEBOOKS, PAGES, notebook_html, write_page_of
from meshwright.result import Result


def test_every_public_answer_is_in_the_table_and_each_entry_names_functions():
    public = [getattr(mw, name) for name in mw.__all__]
    answers = {found for found in public if isinstance(found, type) and issubclass(found, Result)}
    assert {resolve_name(f"meshwright.{name}") for name in NOTEBOOKS} == answers
    functions = [resolve_name(f"meshwright.report.{name}") for drawn in (NOTEBOOKS, PAGES) for name in drawn.values()]
    assert all(map(callable, functions))


def test_no_text_of_a_figure_is_below_eleven_pixels():
    for path in Path(meshwright.report.__path__[0]).rglob("*.py"):
        found = re.findall(r"""fontSize["']?\s*[:=]\s*([\d.]+)""", path.read_text(encoding="utf-8"))
        assert all(float(size) >= 11 for size in found), f"{path}: {found}"


def test_an_answer_that_writes_its_page_has_one_in_the_table():
    writes = {name for name in NOTEBOOKS if {"to_html", "write_html"} & set(vars(resolve_name(f"meshwright.{name}")))}
    assert writes == PAGES.keys()


def test_a_derived_class_is_drawn_as_its_base():
    class Own(mw.CatalogListing):
        pass

    listed = mw.catalog.clusters()
    own = Own(**vars(listed))
    assert own._repr_html_() == listed._repr_html_()


def test_a_class_that_is_not_in_the_table_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="nothing draws object"):
        notebook_html(object())
    with pytest.raises(TypeError, match="no page is drawn of CatalogListing"):
        write_page_of(mw.catalog.clusters(), path=tmp_path / "page.html")
