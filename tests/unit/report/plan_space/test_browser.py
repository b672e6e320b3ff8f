"""The page of all scored plans in a real headless Chromium: filters, sorting, the front, two plans, keyboard."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright import runfile
from meshwright.report.html import write_page
from meshwright.report.plan_space.page import plan_page

ASKED = {"model": "qwen3-0.6b", "cluster": "h100-8x1", "global_sequences": 16, "sequence_length": 4096}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CELLS = "[...document.querySelectorAll('#list tbody tr')].map(r => r.cells[{0}].textContent)"
SET = (
    "(([name, value]) => {{ const f = document.getElementById('filters'); f.elements[name].value = value;"
    " f.dispatchEvent(new Event('input')); return document.getElementById('count').textContent; }})({0})"
)


def set_filter(page, name, value):
    return page.evaluate(SET.format(json.dumps([name, value])))


@pytest.fixture(scope="module")
def ranking():
    return mw.plan(**ASKED, scored=300)


@pytest.fixture(scope="module")
def path(ranking, tmp_path_factory):
    found = tmp_path_factory.mktemp("plans") / "plans.html"
    ranking.write_html(found, command="meshwright plan run.yaml --html plans.html")
    return found


def check(page):
    assert page.errors == []
    assert len(page.requests) == 1  # the page itself


def test_plans_are_filtered_sorted_and_compared(browser, path, ranking):
    page = browser.open(path)
    check(page)
    plans = ranking.scored.plans
    assert page.evaluate(CELLS.format(2))[:3] == [p.plan.describe() for p in plans[:3]]
    # Sort by memory, then the other way.
    head = "document.querySelectorAll('#list th')[7]"
    page.evaluate(f"{head}.querySelector('button').click()")
    sizes = sorted(p.reserved_bytes / 2**30 for p in plans)
    assert page.evaluate(CELLS.format(7))[:5] == [f"{s:.1f}" for s in sizes[:5]]
    assert page.evaluate(f"{head}.getAttribute('aria-sort')") == "ascending"
    # Filters.
    few = [p for p in plans if p.reserved_bytes / 2**30 <= 20]
    assert set_filter(page, "gib", "20") == f"{len(few):,} of {len(plans):,} plans"
    assert set_filter(page, "gib", "0.001") == f"0 of {len(plans):,} plans"
    assert page.evaluate("document.querySelector('#list').innerText").startswith("No plan passes")
    page.evaluate("document.getElementById('filters').reset()")
    page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert set_filter(page, "text", "").startswith(f"{len(plans):,} of")
    # Two plans: the numbers and what one may copy.
    page.evaluate("document.querySelectorAll('#list tbody tr')[4].querySelectorAll('button')[1].click()")
    shown = page.evaluate("[...document.querySelectorAll('#compare h3')].map(h => h.textContent)")
    assert len(shown) == 2
    texts = page.evaluate("[...document.querySelectorAll('#compare pre')].map(p => p.textContent)")
    for i, name in enumerate(shown):
        copied = runfile.loads(texts[2 * i], file="copied.yaml")
        assert copied.plan is not None
        chunk = None if copied.kernels.loss_chunk == "auto" else copied.kernels.loss_chunk
        assert name.endswith(replace(copied.plan, loss_chunk=chunk).describe())
        assert texts[2 * i + 1].startswith("meshwright plan run.yaml --fix tensor=")
        assert texts[2 * i + 1].endswith("--write plan.yaml")
    # The keyboard walks along the front and speaks.
    key = "document.querySelector('canvas').dispatchEvent(new KeyboardEvent('keydown', {{key: '{0}'}}))"
    page.evaluate(key.format("ArrowRight"))
    least = min((p for p in plans if p.on_front), key=lambda p: p.reserved_bytes)
    assert page.evaluate("document.getElementById('spoken').textContent").startswith(least.plan.describe())
    page.evaluate(key.format("b"))
    assert page.evaluate("document.querySelectorAll('#compare h3')[1].textContent").endswith(least.plan.describe())
    painted = (
        "(() => { const c = document.querySelector('canvas'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0;"
        " return n; })()"
    )
    assert page.evaluate(painted) > 3000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dark", "paper"),
    [(390, False, False), (1280, True, False), (1920, False, False), (794, False, True)],
    ids=["phone", "dark", "wide", "paper"],
)
def test_the_page_fits_its_window(browser, path, width, dark, paper):
    page = browser.open(path, width=width, dark=dark, paper=paper)
    check(page)
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate("document.querySelector('canvas').getBoundingClientRect().width") > 0.8 * min(width, 1600)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, a, summary, input, select, [tabindex]')].filter(e => e.tabIndex < 0 "
        "|| !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.slow
def test_one_plan(browser, ranking, tmp_path):
    single = replace(ranking.scored, plans=ranking.scored.plans[:1])
    write_page(plan_page(single, run=ranking.run), path=tmp_path / "one.html")
    page = browser.open(tmp_path / "one.html")
    check(page)
    assert "no second plan" in page.evaluate("document.querySelector('#compare').innerText")


@pytest.mark.slow
def test_ten_thousand_plans_open_in_under_two_seconds(browser, tmp_path):
    found = mw.plan(model="llama3.1-8b", cluster="h100-8x8", global_sequences=512, sequence_length=8192, scored=10_000)
    assert len(found.scored) >= 10_000
    found.write_html(tmp_path / "many.html")
    page = min((browser.open(tmp_path / "many.html") for _ in range(3)), key=lambda p: p.load_s)
    check(page)
    assert page.load_s < 2.0
    begun = "performance.now()"
    before = page.evaluate(begun)
    set_filter(page, "gib", "40")
    assert page.evaluate(begun) - before < 500  # milliseconds
