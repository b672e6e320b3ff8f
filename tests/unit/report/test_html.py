from html.parser import HTMLParser

import pytest

from meshwright.errors import InputError
from meshwright.report.charts import INK
from meshwright.report.estimate_page import estimate_page
from meshwright.report.html import Endnotes, PageSection, document, figure, table, tiles, write_page

LOADS = {"link", "img", "iframe", "object", "embed", "audio", "video", "source", "image", "use"}
VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Parts of a page: what it would load, its text, and tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in LOADS or "src" in found or "xlink:href" in found or "url(" in (found.get("style") or ""):
            self.loads.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module", params=["flat", "pipelined"])
def page(request):
    text = estimate_page(request.getfixturevalue(request.param))
    return text, Page(text)


def test_a_page_loads_nothing(page):
    text, parsed = page
    assert parsed.loads == []
    assert all(link.startswith(("#", "https://")) for link in parsed.links)  # followed by a reader, not loaded
    for word in ("@import", "@font-face", "url(http", "<?xml-stylesheet"):
        assert word not in text


def test_a_page_is_well_formed_and_its_notes_exist(page):
    _, parsed = page
    assert parsed.open == []
    inside = [link.removeprefix("#") for link in parsed.links if link.startswith("#")]
    assert len(inside) > 5
    assert set(inside) == {i for i in parsed.ids if i.startswith(("note-", "section-", "content"))}


def test_a_page_has_figures_and_sources(page):
    text, parsed = page
    assert text.count("<svg") >= 3
    words = " ".join(parsed.words).replace("\N{NO-BREAK SPACE}", " ")
    for expected in ("Where the time goes", "Where the memory goes", "80 % interval", "calibration", "bf16"):
        assert expected in words
    assert "nan" not in words.lower().split()


def test_a_legend_names_the_colours_that_are_drawn():
    drawn = f'<svg><path fill="#3f78b5"/><path stroke="{INK}"/></svg>'
    text = figure(drawn, legend=[("measured", "#3f78b5"), ("rule", INK), ("absent", "#4c9a6a"), ("band", "#3f78b547")])
    assert [name for name in ("measured", "rule", "absent", "band") if f"</i>{name}<" in text] == [
        "measured", "rule", "band",
    ]  # fmt: skip
    assert '<i style="background:currentColor"></i>rule' in text  # the colour of the page's text, in the dark too


def test_a_figure_is_drawn_for_phones_too(page):
    text, _ = page
    narrow = text.count('class="for-narrow"')
    assert narrow == text.count('class="for-wide"') >= 3
    assert text.count("Data and command of this figure") >= 3
    assert text.count("<script>") == 1  # the tables sort


def test_the_page_of_a_pipeline_draws_it(pipelined, flat):
    assert '<svg class="timeline for-wide"' in estimate_page(pipelined)
    assert '<svg class="timeline for-wide"' not in estimate_page(flat)
    assert "Memory of every pipeline rank" in estimate_page(pipelined)
    assert "Memory of every pipeline rank" not in estimate_page(flat)


def test_the_page_is_the_same_twice(flat):
    assert estimate_page(flat) == estimate_page(flat)


def test_notes_are_numbered_as_they_come_and_once():
    notes = Endnotes()
    marks = [notes.mark(source) for source in ("b", "a", "b")]
    assert ["note-1" in m for m in marks] == [True, False, True]
    assert notes.html().index("b</li>") < notes.html().index("a</li>")


def test_text_is_escaped():
    parts = [table(("<h>",), [("<td>",)], name="<c>"), tiles([("<v>", "&", "")])]
    text = document(title="<t>", lead="", sections=[PageSection(title="<s>", parts=parts)], footer="<f>")
    for word in ("h", "td", "c", "v", "t", "s", "f"):
        assert f"&lt;{word}&gt;" in text


def test_a_page_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_page("x", path=tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_page("x", path=tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]  # nothing half-written stays


def test_an_old_page_is_replaced(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    write_page("new", path=path)
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
