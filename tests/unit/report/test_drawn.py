"""The table of what draws each answer."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import meshwright as mw
import meshwright.report
from meshwright.report.drawn import NOTEBOOKS, PAGES, notebook_html
from meshwright.report.html import with_unbroken_units
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


def test_the_page_of_a_class_without_its_own_is_what_a_notebook_shows(tmp_path):
    assert PAGES.keys() < NOTEBOOKS.keys()
    listed = mw.catalog.clusters()
    listed.write_html(tmp_path / "page.html", command="meshwright catalog clusters")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert with_unbroken_units(listed._repr_html_()) in page
    assert "meshwright catalog clusters" in page


def test_a_derived_class_is_drawn_as_its_base():
    class Own(mw.CatalogListing):
        pass

    listed = mw.catalog.clusters()
    own = Own(**vars(listed))
    assert own._repr_html_() == listed._repr_html_()


def test_a_class_that_is_not_in_the_table_is_an_error():
    with pytest.raises(TypeError, match="nothing draws object"):
        notebook_html(object())
