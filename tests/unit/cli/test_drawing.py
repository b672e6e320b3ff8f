"""Tables on terminals of every width."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.printed_tables import check_whole, printed_at

from meshwright.cli import output
from meshwright.cli.drawing import TableOrBlocks, table

SCALED = {"devices": "left", "tokens/s/device": "right", "80 % interval": "right", "GB/s": "right"}
SCALED_ROWS = [("1,024", "485", "470 to 500 GB", "16.3"), ("16,384", "344", "330 to 360 GB", "8.19")]


def drawn(columns, rows, *, width, monkeypatch, title=None, caption=None):
    """The lines of a table, without the spaces at their ends."""
    shown = table(columns, rows, title=title, caption=caption)
    return [line.rstrip() for line in printed_at(width, shown, monkeypatch).splitlines()]


def test_headings_wrap_before_numbers(monkeypatch):
    assert drawn(SCALED, SCALED_ROWS, width=43, monkeypatch=monkeypatch) == [
        "             tokens/",
        "devices     s/device   80 % interval   GB/s",
        "───────────────────────────────────────────",
        "1,024            485   470 to 500 GB   16.3",
        "16,384           344   330 to 360 GB   8.19",
    ]


def test_a_number_stays_with_its_unit(monkeypatch):
    assert drawn(SCALED, SCALED_ROWS, width=34, monkeypatch=monkeypatch) == [
        "          tokens/       80 %",
        "devices  s/device   interval  GB/s",
        "──────────────────────────────────",
        "1,024         485     470 to  16.3",
        "                      500 GB",
        "16,384        344     330 to  8.19",
        "                      360 GB",
    ]


def test_a_table_that_is_too_wide_has_a_block_for_each_row(monkeypatch):
    lines = drawn(SCALED, SCALED_ROWS, width=30, monkeypatch=monkeypatch, title="Strong scaling", caption="End")
    assert lines == [
        "Strong scaling",
        "devices          1,024",
        "tokens/s/device  485",
        "80 % interval    470 to 500 GB",
        "GB/s             16.3",
        "",
        "devices          16,384",
        "tokens/s/device  344",
        "80 % interval    330 to 360 GB",
        "GB/s             8.19",
        "End",
    ]


def test_the_column_that_names_the_rows_wraps_before_blocks_are_drawn(monkeypatch):
    lines = drawn({"plan": "left", "step": "right"}, [("TP8 PP16 mbs1", "1.5 s")], width=15, monkeypatch=monkeypatch)
    assert lines == ["plan       step", "───────────────", "TP8 PP16  1.5 s", "mbs1"]


def test_a_wrapped_cell_keeps_its_indentation(monkeypatch):
    rows = [("loss", "1.85 s"), ("  passes over logits", "1.5 s")]
    lines = drawn({"component": "left", "time": "right"}, rows, width=22, monkeypatch=monkeypatch)
    assert lines[2:] == ["loss            1.85 s", "  passes over    1.5 s", "  logits"]


def test_a_value_that_is_wider_than_its_column_stands_below_its_heading(monkeypatch):
    path = "/a/path/that/is/longer/than/the/terminal/is/wide"
    lines = drawn({"setting": "left", "file": "left"}, [("cache", path), ("", "x")], width=30, monkeypatch=monkeypatch)
    assert lines == ["setting  cache", "file", path, "", "file     x"]


def test_a_title_that_is_wider_than_the_table_keeps_its_words(monkeypatch):
    lines = drawn({"step": "right"}, [(1,)], width=30, monkeypatch=monkeypatch, title="/data/checkpoints of here")
    assert lines == ["/data/checkpoints of here", "step", "────", "   1"]


def test_a_narrow_table_without_rows_prints_its_headings(monkeypatch):
    lines = drawn(SCALED, [], width=20, monkeypatch=monkeypatch)
    assert lines == ["devices", "tokens/s/device", "80 % interval", "GB/s"]


def test_a_styled_cell_keeps_its_style():
    shown = table({"verdict": "left"}, [(output.styled("fail", "red"),)], title=None, caption=None)
    assert shown.rows[0][0].style == "red"


def test_a_paragraph_breaks_no_word(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "/a/path/that/is/longer/than/the/line"
    output.print_line(f"Records: {path}; page: /a/b.html")
    assert capsys.readouterr().out.split() == ["Records:", f"{path};", "page:", "/a/b.html"]


@pytest.mark.parametrize(("columns", "widest"), [(89, 8), (90, 24)])
def test_bars_are_short_where_the_names_need_the_space(columns, widest, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert output.bar_width(24, table=90) == widest


WORD = st.text("abcé中1", min_size=1, max_size=12) | st.text("xyz", min_size=15, max_size=40)
NUMBER = st.from_regex(r"[+-]?[0-9]{1,3}(,[0-9]{3}){0,2}(\.[0-9]{1,3})?( (%|s|GiB|tokens))?", fullmatch=True)
SENTENCE = st.lists(WORD | NUMBER, max_size=6).map(" ".join)
QUANTITY = st.one_of(NUMBER, st.just(""), st.tuples(NUMBER, NUMBER).map(" to ".join))


@st.composite
def tables(draw: st.DrawFn) -> TableOrBlocks:
    """Tables of words and numbers."""
    headings = draw(st.lists(SENTENCE, min_size=1, max_size=9, unique=True))
    columns = {heading: draw(st.sampled_from(["left", "right"])) for heading in headings}
    row = st.tuples(*(SENTENCE if align == "left" else QUANTITY for align in columns.values()))
    title, caption = draw(SENTENCE), draw(SENTENCE)
    return table(columns, draw(st.lists(row, max_size=3)), title=title, caption=caption)


@settings(max_examples=25)
@given(shown=tables(), width=st.integers(20, 140))
def test_no_word_is_lost_at_any_width(shown, width):
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_whole(shown, printed_at(width, shown, monkeypatch), width=width)
