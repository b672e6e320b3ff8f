"""Pages in a real headless Chromium: nothing is loaded, nothing fails, figures are drawn, tables sort.

One test runs by default; the others, with more pages and sizes, are slow.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.browser import DRAWING_FAULTS
from tests.record_folders import write_serving, write_training

from meshwright.answers.comparison.study import compare_items
from meshwright.answers.overview.collect import collect
from meshwright.report.comparison.page import comparison_page
from meshwright.report.html import PageSection, document, sortable_table, write_page
from meshwright.report.overview.page import record_page

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    where = tmp_path_factory.mktemp("pages")
    for i, name in enumerate(("slow", "fast")):
        write_training(where / "records" / name, speed=1 + i / 2, statistics__num_devices=8 * (i + 1))
    write_serving(where / "records" / "server")
    write_page(record_page(collect([str(where / "records")]), command="meshwright report"), path=where / "report.html")
    found = compare_items([str(where / "records" / n) for n in ("slow", "fast")])
    write_page(comparison_page(found, command="meshwright compare"), path=where / "compare.html")
    return where


def check(page):
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []
    assert len(page.requests) == 1  # the page itself
    assert page.evaluate("[...document.images].length") == 0


def test_a_report_loads_nothing_draws_its_figures_and_sorts_its_tables(browser, pages):
    page = browser.open(pages / "report.html")
    check(page)
    drawn = page.evaluate(
        "[...document.querySelectorAll('figure svg.for-wide')]"
        ".map(s => [s.getBoundingClientRect().width, s.querySelectorAll('path').length])"
    )
    assert len(drawn) >= 7
    assert page.evaluate(DRAWING_FAULTS) == []
    assert all(width > 300 and paths > 3 for width, paths in drawn)
    cells = "[...document.querySelectorAll('.sortable')[0].tBodies[0].rows].map(r => r.cells[9].textContent)"
    head = "document.querySelectorAll('.sortable')[0].tHead.rows[0].cells[9]"
    page.evaluate(f"{head}.querySelector('button').click()")
    assert page.evaluate(cells) == ["9,362", "14,043", ""]
    assert page.evaluate(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.evaluate(f"{head}.querySelector('button').click()")
    assert page.evaluate(cells) == ["14,043", "9,362", ""]
    # One click away: the data of a figure and the command that makes it.
    page.evaluate("document.querySelector('details summary').click()")
    opened = page.evaluate("document.querySelector('details').innerText")
    assert "meshwright report" in opened
    assert "14,043" in opened


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize(
    ("width", "dark", "paper"),
    [(390, False, False), (1280, True, False), (1920, False, False), (794, False, True)],
    ids=["phone", "dark", "wide", "paper"],
)
def test_pages_fit_their_window(browser, pages, name, width, dark, paper):
    page = browser.open(pages / f"{name}.html", width=width, dark=dark, paper=paper)
    check(page)
    assert page.evaluate(OVERFLOW) <= 0  # nothing is wider than the window
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(20, 23, 27)") == dark
    shown = page.evaluate(
        "[...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().width > 0)"
        ".map(s => [s.classList.contains('for-narrow'), s.getBoundingClientRect().right])"
    )
    assert {narrow for narrow, _ in shown} == {width < 600}
    assert max(right for _, right in shown) <= width  # no figure scrolls sideways
    assert paper or page.evaluate(DRAWING_FAULTS) == []
    if width == 1920:
        used = page.evaluate("document.querySelector('main').getBoundingClientRect().width")
        assert used > 0.8 * width
    cut = "[...document.querySelectorAll('figure svg text')].filter(t => t.textContent.endsWith('\u2026')"
    assert page.evaluate(cut + " && t.closest('.role-axis-title')).map(t => t.textContent)") == []
    if paper:
        # Values stand in one line each; only names and sentences break.
        assert page.evaluate(
            "[...document.querySelectorAll('.sortable td:not(.text):not(:first-child)')].filter(cell => {"
            " const range = document.createRange(); range.selectNodeContents(cell);"
            " const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));"
            " return lines.size > cell.textContent.split(/[\\s-]+/).length }).map(c => c.textContent)"
        ) == []  # fmt: skip
        assert page.pdf().startswith(b"%PDF")


@pytest.mark.slow
def test_the_keyboard_reaches_every_control(browser, pages):
    page = browser.open(pages / "report.html")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, a, summary, [tabindex]')]"
        ".filter(e => e.tabIndex < 0 || !(e.textContent.trim() || e.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0
    # Figures have a name for screen readers, tables have captions and scoped headings.
    assert page.evaluate(
        "[...document.querySelectorAll('figure svg')].every(s => s.getAttribute('role') === 'img' && s.ariaLabel)"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('.sortable')]"
        ".every(t => t.caption && [...t.tHead.rows[0].cells].every(c => c.scope === 'col'))"
    )
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


@pytest.mark.slow
def test_labels_of_ticks_do_not_overlap(browser, pages):
    page = browser.open(pages / "report.html", width=1600)
    overlaps = page.evaluate(
        """[...document.querySelectorAll('.role-axis-label')].flatMap(axis => {
          const boxes = [...axis.querySelectorAll('text')].filter(t => t.style.opacity !== '0' && t.textContent
            && getComputedStyle(t).opacity !== '0').map(t => [t.textContent, t.getBoundingClientRect()]);
          return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
            p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom).map(([b]) => [a, b]));
        })"""
    )
    assert overlaps == []


@pytest.mark.slow
def test_ten_thousand_records_open_in_under_two_seconds(browser, pages, tmp_path):
    for i in range(10_000):
        write_training(tmp_path / "many" / f"run-{i:05}", speed=1 + (i % 97) / 100, num_steps=4)
    found = collect([str(tmp_path / "many")])
    assert len(found.entries) == 10_000
    path = tmp_path / "many.html"
    write_page(record_page(found), path=path)
    for width in (1280, 390):
        page = min((browser.open(path, width=width) for _ in range(3)), key=lambda p: p.load_s)
        check(page)
        assert page.load_s < 2.0


def test_a_long_table_sorts_filters_and_saves_rows_that_are_not_drawn(browser, tmp_path):
    rows = [(f"run-{i:04}", f"{(i * 7919 + 5) % 3000:,}") for i in range(3000)]
    table = sortable_table(("name", "rate"), rows, name="Many")
    write_page(document(title="x", lead="", sections=[PageSection(title="x", parts=[table])], footer=""),
               path=tmp_path / "long.html")  # fmt: skip
    page = browser.open(tmp_path / "long.html")
    check(page)
    body = "[...document.querySelector('table').tBodies[0].rows].map(r => r.cells[1].textContent)"
    caption = "document.querySelector('caption').textContent"
    press = "[...document.querySelectorAll('.actions button')].find(b => b.textContent.startsWith('{}')).click()"
    assert len(page.evaluate(body)) == 200
    first = "document.querySelector('td:nth-child(2)').textContent"
    unpacked = f"(async () => {{ while ({first} !== '0') await new Promise(done => setTimeout(done, 20)) }})()"
    page.evaluate(f"document.querySelectorAll('th button')[1].click(); {unpacked}")
    assert page.evaluate(body) == [f"{i:,}" for i in range(200)]  # of all 3,000
    assert page.evaluate(caption) == "Many (200 of 3,000 rows)"
    page.evaluate(press.format("Show"))
    assert page.evaluate(caption) == "Many (1,200 of 3,000 rows)"
    field = "document.querySelector('.actions input')"
    page.evaluate(f"{field}.value = 'RUN-29'; {field}.dispatchEvent(new Event('input'))")
    assert page.evaluate(caption) == "Many (100 of 100 rows that match)"
    page.evaluate("window.saved = []; URL.createObjectURL = b => (window.saved.push(b), 'data:,')")
    page.evaluate(press.format("Save"))
    assert page.evaluate("window.saved[0].size") == len("name,rate\n") + sum(
        len(f'{a},"{b}"\n') if "," in b else len(f"{a},{b}\n") for a, b in rows if a.startswith("run-29")
    )


@pytest.mark.slow
def test_names_of_any_length_stay_in_a_phone(browser, tmp_path):
    for name in ("a" * 120, "x & y <b>"):
        write_training(tmp_path / "odd" / name)
    path = tmp_path / "odd.html"
    write_page(record_page(collect([str(tmp_path / "odd")])), path=path)
    page = browser.open(path, width=390)
    check(page)
    assert page.evaluate(OVERFLOW) <= 0
