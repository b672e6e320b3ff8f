"""Axes that one outlier does not flatten, in figures of reports and of comparisons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.record_folders import write_training

from meshwright.answers.comparison.study import compare_items
from meshwright.answers.overview.collect import collect
from meshwright.report.charts import FACTOR, OUTLIER_LEGEND, axis_end
from meshwright.report.comparison.page import comparison_page
from meshwright.report.overview.page import record_page

CUT = OUTLIER_LEGEND[0]


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40))
def test_few_values_are_beyond_an_axis_and_each_by_far(sizes):
    end = axis_end(sizes)
    beyond = [s for s in sizes if s > end]
    assert end in sizes
    assert len(beyond) <= len(sizes) / 3
    assert all(s > FACTOR * end for s in beyond)


@given(st.lists(st.floats(1.0, 4.9), min_size=1, max_size=40))
def test_values_of_one_size_are_all_on_the_axis(sizes):
    assert axis_end(sizes) == max(sizes)


def test_an_outlier_of_a_report_is_marked_and_keeps_its_value(tmp_path):
    for i, speed in enumerate((1.0, 1.1, 1.2, 300.0)):
        write_training(tmp_path / f"r{i}", speed=speed, statistics__mfu=0.4)
    page = record_page(collect([str(tmp_path)]))
    assert page.count(CUT) == 1  # throughput; MFU and memory have no outlier
    assert "2,808,600 »" in page
    write_training(tmp_path / "r3", statistics__mfu=0.4)
    assert CUT not in record_page(collect([str(tmp_path)]))


@pytest.mark.when_touched  # test_an_outlier_of_a_report_is_marked_and_keeps_its_value has the marks
def test_an_outlier_of_a_comparison_is_marked_and_keeps_its_ratio(tmp_path):
    for side in ("before", "after"):
        for i in range(4):
            speed = 5000.0 if (side, i) == ("after", 3) else 1.0
            write_training(tmp_path / side / f"r{i}", speed=speed, run__model={"name": f"model-{i}"})
    page = comparison_page(compare_items([str(tmp_path / "before"), str(tmp_path / "after")]))
    assert "5,000 »" in page
    assert "outside the axis" in page
