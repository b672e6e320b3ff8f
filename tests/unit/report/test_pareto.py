"""Figures with a Pareto front: names lie apart, those on the front come first, and none leaves the plot."""

from __future__ import annotations

import re

import pytest

alt = pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from meshwright.report.figures import pareto_svg


def drawn_names(rows, *, narrow=False):
    x = alt.X("x:Q", scale=alt.Scale(type="log"))
    text = pareto_svg(rows, x=x, y=alt.Y("y:Q"), title="t", is_log=True)
    wide, _, phone = text.partition("</svg>")
    return set(re.findall(r">(point \w+)</text>", phone if narrow else wide))


def row(name, x, y, front="no"):
    return {"name": f"point {name}", "x": x, "y": y, "front": front}


def test_a_name_that_would_lie_on_one_of_the_front_is_left_out():
    rows = [row("other", 1.0, 0.500), row("best", 1.01, 0.501, "yes"), row("far", 100.0, 1.0), row("low", 1.0, 0.1)]
    assert drawn_names(rows) == {"point best", "point far", "point low"}


def test_no_name_covers_a_point():
    """Of a plot from 1 to 100 across."""
    rows = [row("a" * 20, 3.0, 0.9, "yes"), row("b", 5.0, 0.905), row("low", 1.0, 0.0), row("far", 99.0, 1.0)]
    assert f"point {'a' * 20}" not in drawn_names(rows)
    assert f"point {'a' * 20}" in drawn_names([rows[0], *rows[2:]])


def test_a_phone_has_room_for_fewer_names():
    rows = [row("left", 1.0, 0.5, "yes"), row("right", 2.5, 0.505), row("far", 100.0, 1.0), row("low", 1.0, 0.1)]
    assert drawn_names(rows) - drawn_names(rows, narrow=True) == {"point left"}  # it would cover the point to its right


def test_a_name_at_the_right_edge_stands_left_of_its_point():
    long = row("x" * 40, 100.0, 1.0, "yes")
    text = pareto_svg([row("a", 1.0, 0.1), long], x=alt.X("x:Q"), y=alt.Y("y:Q"), title="t")
    assert re.search(r'<text [^>]*text-anchor="end"[^>]*>point x+</text>', text)


def test_one_point_is_drawn():
    assert drawn_names([row("only", 3.0, 0.5, "yes")]) == {"point only"}
