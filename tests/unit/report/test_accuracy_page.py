import pytest
from tests.predicted_rows import ten_percent_high
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.report import HEADLINE, AccuracyReport, compare
from meshwright.answers.accuracy_study import AccuracyStudy
from meshwright.report.accuracy import (
    BLIND_TITLE,
    LEGEND,
    accuracy_page,
    accuracy_tables,
    legend,
    metrics_table,
    rows_table,
    subset_of,
)


@pytest.fixture(scope="module")
def report() -> AccuracyReport:
    """Every fortieth shipped row."""
    return compare(shipped_runs()[::40], predict=ten_percent_high)


@pytest.fixture(scope="module")
def page(report: AccuracyReport) -> str:
    return accuracy_page(AccuracyStudy(report=report))


def test_the_page_has_both_figures_and_stands_alone(report: AccuracyReport, page: str) -> None:
    assert page.count('class="for-wide"') == page.count('class="for-narrow"') == 6
    assert page.count('aria-label="Error of the predicted rate by') == 2 * 5
    assert page.count("<td") > 9 * len(report.rows) // 10  # run by run, in the data of the first figure
    for word in ("src=", "http:", "<link"):
        assert word not in page.replace("http://www.w3.org", "")
    for kind in report.groups:
        if kind != "subset":
            assert f"<h2>By {kind}</h2>" in page


@pytest.mark.when_touched  # test_the_page_has_both_figures_and_stands_alone has the page
def test_the_title_names_leave_one_source_out(report: AccuracyReport, page: str) -> None:
    assert (
        "leave-one-source-out"
        in accuracy_page(AccuracyStudy(report=report, leave_one_source_out=True)).split("</title>")[0]
    )
    assert "leave-one-source-out" not in page.split("</title>")[0]


def test_the_key_figures_are_those_of_the_headline(report: AccuracyReport, page: str) -> None:
    tiles = page.split("<section>")[0]
    assert report.headline
    assert f"<b>{report.headline.num_predicted:,}</b>" in tiles
    assert "<b>10.0\N{NO-BREAK SPACE}%</b>" in tiles
    assert "<b>+10.0\N{NO-BREAK SPACE}%</b>" in tiles


def test_the_legend_names_each_subset_that_is_drawn(report: AccuracyReport) -> None:
    drawn = {subset_of(row) for row in report.rows if row.predicted > 0 and row.measured > 0}
    assert [name for name, _ in legend(report)] == [name for name in LEGEND if name in drawn]
    assert HEADLINE in drawn


def test_a_page_of_no_rows_still_opens() -> None:
    assert "<svg" in accuracy_page(AccuracyStudy(report=compare([], predict=ten_percent_high)))


def test_a_name_cannot_break_the_page(report: AccuracyReport) -> None:
    groups = {**report.groups, "source": {"<b>blog</b>": report.summary}}
    page = accuracy_page(AccuracyStudy(report=AccuracyReport(**{**vars(report), "groups": groups})))
    assert "&lt;b&gt;blog" in page
    assert "<b>blog" not in page


def test_tables_hold_every_group_and_every_row(report: AccuracyReport) -> None:
    titles = [shown.title for shown in accuracy_tables(report, by="accelerator")]
    assert titles == ["Error of tokens/s per device", "By accelerator", BLIND_TITLE, "Not predicted"]
    subsets = [row[0] for row in accuracy_tables(report, by="accelerator")[0].rows]
    assert (subsets[0], subsets[-1]) == (HEADLINE, "all rows")
    assert len(rows_table(report).rows) == len(report.rows)
    shown = metrics_table("", report.groups["accelerator"])
    assert {row[0] for row in shown.rows} == set(report.groups["accelerator"])
    assert all(len(row) == len(shown.headings) for row in shown.rows)


def test_what_is_not_known_is_an_empty_cell(report: AccuracyReport) -> None:
    memory = [row[7] for row in metrics_table("", {"all": report.summary}).rows]
    assert memory == [""]
