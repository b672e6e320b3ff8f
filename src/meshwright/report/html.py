"""A page that is one file: no fonts, nothing loaded; light and dark; narrow, wide and on paper.

    document(title=..., lead=..., sections=[PageSection(...)])  -> text
    write_page(text, path=...)                               the whole file appears or none of it

A page with sortable tables holds one script, and is complete without it.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.answers.text_table import TextTable, unbroken
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.report.charts import FAINT, INK
from meshwright.report.figures import svg
from meshwright.version import __version__

LINK = re.compile(r"(?P<url>https?://[^\s<>,;)\]]+[^\s<>,;.)\]])|\bgithub:(?P<repository>[\w.-]+/[\w.-]*\w)")
"""Links in a source: a page, or a repository in the short form of the catalogue."""


_UNIT = r"(?:%|[nmµ]?s|min|h|days|[KMGTP]i?B(?:/s)?|[KMGT]?FLOP/s|[kMG]?Wh?|USD)(?![\w/])"
_BREAKABLE = re.compile(rf"(<(pre|code|script|style|svg)\b.*?</\2>|<[^>]*>)|(?<=\d) (?={_UNIT})", re.DOTALL)
"""A space between a number and its unit, where tags and what is not prose come first."""


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A heading and the HTML below it."""

    title: str
    parts: Sequence[str]
    is_wide: bool = False  # spans both columns of a wide window, as one with a table of many columns does


class Endnotes:
    """Numbers the sources of a page in the order in which they are first named."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, source: str) -> str:
        """The superscript that links to the note."""
        number = self._numbers.setdefault(source, len(self._numbers) + 1)
        return f'<sup><a href="#note-{number}">{number}</a></sup>'

    def html(self) -> str:
        """All notes that were named."""
        items = (f'<li id="note-{n}">{linked(source)}</li>' for source, n in self._numbers.items())
        return f'<ol class="notes">{"".join(items)}</ol>'


def linked(source: str) -> str:
    """A source as HTML, with a link where it names a page or a repository.

    >>> linked("github:NVIDIA/NeMo docs/x.md, 2025")
    '<a href="https://github.com/NVIDIA/NeMo">github:NVIDIA/NeMo</a> docs/x.md, 2025'
    >>> linked("a < b, see https://example.org/x, page 2")
    'a &lt; b, see <a href="https://example.org/x">https://example.org/x</a>, page 2'
    """

    def link(found: re.Match[str]) -> str:
        target = found["url"] or f"https://github.com/{found['repository']}"
        return f'<a href="{target}">{found[0]}</a>'

    return LINK.sub(link, escape(source))


LEAST_CONTENTS = 3
"""Sections of a page with a list of contents."""

SORTS = 'data-name="'
"""Attribute of a table that sorts."""


def document(
    *,
    title: str,
    lead: str,
    sections: Iterable[PageSection],
    footer: str,
    style: str = "",
    script: str = "",
    data: str = "",
) -> str:
    """The whole page. `title` and `footer` are text, `lead` and the sections' parts are HTML.

    A page of several sections has a list of contents, and one with tables that sort their script. `style` and
    `script` are of this page alone; `data` is the element that the script reads.
    """
    listed = list(sections)
    sections_html = [_section(number, s) for number, s in enumerate(listed, start=1)]
    body = "".join(_with_a_neighbour(sections_html))
    is_long = len(listed) >= LEAST_CONTENTS
    contents = _contents(listed) if is_long else ""
    skip = '<a class="skip" href="#content">Skip to the content</a>' if is_long else ""
    sorts = asset("meshwright.report", "page.js") if SORTS in body else ""
    scripts = "".join(f"<script>{text}</script>" for text in (sorts, script) if text)
    main = with_unbroken_units(
        f"<main><header><h1>{escape(title)}</h1>{lead}</header>{contents}"
        f'<div class="sections" id="content">{body}</div><footer>{escape(footer)}</footer></main>'
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style_sheet('page.css')}{style}</style></head>"
        f"<body>{skip}{main}{data}{scripts}</body></html>\n"
    )


def with_unbroken_units(html: str) -> str:
    """The same text, in which a number stays on the line of its unit.

    >>> with_unbroken_units('<p title="8 %">8 % of 3 GiB, 2 steps</p>').replace("\N{NO-BREAK SPACE}", "~")
    '<p title="8 %">8~% of 3~GiB, 2 steps</p>'
    """
    return _BREAKABLE.sub(lambda found: found[1] or "\N{NO-BREAK SPACE}", html)


def measured_page(
    title: str,
    *,
    lead: str,
    key_figures: Iterable[tuple[str, str, str]],
    notes: Iterable[str],
    sections: Sequence[PageSection],
    conditions: Mapping[str, object],
    about: Mapping[str, Any],
) -> str:
    """The page of a measurement: key figures with notes below them, and at the end the conditions that are known.

    `about` is the record: its command, and the times at which it started and ended, where it says so.
    """
    known = {**conditions, "command": shlex.join(about["command"])}
    if "ended" in about:
        known["from, to"] = f"{about['started']}, {about['ended'] or 'interrupted'}"
    rows = [(name, value) for name, value in known.items() if value]
    shown = TextTable(title="Conditions", headings=("", "what"), rows=rows, text_columns=("what",))
    cautions = "".join(paragraph(f"Note: {text}.", css_class="lead") for text in notes)
    return document(
        title=title, lead=paragraph(lead, css_class="lead") + tiles(key_figures) + cautions,
        sections=[*sections, *table_sections(shown)],
        footer=f"Meshwright {__version__}. Measured on {about['started'][:10]}.",
    )  # fmt: skip


def table_sections(*tables: TextTable) -> list[PageSection]:
    """A section for each table that has rows."""
    return [PageSection(title=t.title, parts=[page_table(t)]) for t in tables if t.rows]


@cache
def asset(package: str, name: str) -> str:
    """A file of a page beside the code that draws it: its script, its styles, parts of it."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def _style_sheet(name: str) -> str:
    """A style sheet with the placeholder colours of figures, which it replaces by the page's."""
    return asset("meshwright.report", name).replace("INK", INK).replace("FAINT", FAINT)


def _section(number: int, section: PageSection) -> str:
    title, below = escape(section.title), "".join(section.parts)
    wide = WIDE if section.is_wide or BROAD in below else ""
    # A caption that repeats the heading is for screen readers alone.
    below = below.replace(f"<caption>{title}</caption>", f'<caption class="unseen">{title}</caption>')
    return f'<section id="section-{number}"{wide}><h2>{title}</h2>{below}</section>'


def _with_a_neighbour(sections: Sequence[str]) -> Iterator[str]:
    """The sections; one without another in its row spans both columns, and its parts stand in columns."""
    is_left = True
    for text, after in zip(sections, (*sections[1:], WIDE), strict=True):
        if WIDE in text.partition(">")[0]:
            is_left = True
        elif is_left and WIDE in after.partition(">")[0]:
            text = text.replace("<section ", '<section class="lone" ', 1)
        else:
            is_left = not is_left
        yield text


def _contents(sections: Sequence[PageSection]) -> str:
    links = (f'<li><a href="#section-{n}">{escape(s.title)}</a></li>' for n, s in enumerate(sections, start=1))
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def paragraph(text: str, *, marks: str = "", css_class: str = "") -> str:
    """A paragraph of text with the numbers of its notes."""
    attribute = f' class="{css_class}"' if css_class else ""
    return f"<p{attribute}>{escape(text)}{marks}</p>"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, name: str, text_columns: Collection[str] = ()
) -> str:
    """A table with the caption `name`: the first column and `text_columns` are aligned left, figures right."""
    kinds = [' class="text"' if h in text_columns else "" for h in headings]
    head = "".join(f'<th scope="col"{kind}>{escape(h)}</th>' for kind, h in zip(kinds, headings, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(str(c))}</td>" for kind, c in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    caption = f"<caption>{escape(name)}</caption>"
    return f'<div class="table"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


SHOWN_ROWS = 200
"""Rows of a long table that are drawn at first; a button draws more of those that the page holds, packed."""


MOST_ROOMY, MOST_DENSE = 6, 10
"""Columns of a table with wide gaps, and with narrow ones in half of a wide window. More take its whole width."""

WIDE = ' class="wide"'
BROAD = "sortable dense broad"
"""Style classes of a table of more columns than `MOST_DENSE`."""


def sortable_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, name: str, text_columns: Collection[str] = ()
) -> str:
    """A table whose columns sort at a click or a key, and that can be saved as CSV; for pages with a script.

    Sorting, saving and the filter of a long table act on all rows, drawn or not. `name` is the caption that a screen
    reader reads and the name of the file.
    """
    kinds = ["text" if i == 0 or h in text_columns else "" for i, h in enumerate(headings)]
    head = "".join(
        f'<th scope="col"{_css(kind)}><button type="button">{escape(h) or "&nbsp;"}</button></th>'
        for kind, h in zip(kinds, headings, strict=True)
    )
    shown = [["" if c is None else str(c) for c in row] for row in rows]
    body = "".join(
        f"<tr>{''.join(f'<td{_css(k)}>{escape(c)}</td>' for k, c in zip(kinds, row, strict=True))}</tr>"
        for row in shown[:SHOWN_ROWS]
    )
    held = ""
    if len(shown) > SHOWN_ROWS:
        text = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
        packed = base64.b64encode(gzip.compress(text, mtime=0)).decode()
        held = f'<script type="application/gzip">{packed}</script>'
    css_class = BROAD if len(headings) > MOST_DENSE else "sortable dense" if len(headings) > MOST_ROOMY else "sortable"
    many = f" ({SHOWN_ROWS} of {len(shown):,} rows)" if held else ""
    return (
        f'<div class="table" tabindex="0" role="group" aria-label="{escape(name)}" {SORTS}{escape(name)}" '
        f'data-rows="{len(shown)}">'
        f'<table class="{css_class}"><caption>{escape(name)}{many}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{held}</div>"
    )


def _css(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def numbered_notes(texts: Iterable[str]) -> str:
    """Endnotes as a numbered list, with links."""
    return f'<ol class="notes">{"".join(f"<li>{linked(text)}</li>" for text in texts)}</ol>'


def explained_figure(
    picture: str, *, title: str, data: str, command: str, legend: Iterable[tuple[str, str]] = ()
) -> str:
    """A figure with its title; its data, a table, and the command that makes it are one click away."""
    drawn = figure(picture, legend=legend)
    made = f"<p>Made by</p><pre>{escape(command)}</pre>" if command else ""
    return (
        f'<div class="explained"><h3>{escape(title)}</h3>{drawn}'
        f"<details><summary>Data and command of this figure</summary>{made}{data}</details></div>"
    )


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report with its data. `picture` is inline SVG where no chart makes it."""

    title: str
    data: TextTable
    chart: Any = None
    picture: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def html(self, *, command: str) -> str:
        """The figure with its data; `command` makes it."""
        drawn = self.picture or svg(self.chart, title=self.title)
        return explained_figure(
            drawn, title=self.title, data=page_table(self.data), command=command, legend=self.legend
        )


def text_table(shown: TextTable) -> str:
    """A report's table for a notebook. The text of its caption is below it."""
    rows = [["" if c is None else unbroken(str(c)) for c in row] for row in shown.rows]
    return table(shown.headings, rows, name=shown.title, text_columns=shown.text_columns) + _below(shown)


def page_table(shown: TextTable) -> str:
    """A report's table for a page with a script: its columns sort. The caption is below it."""
    drawn = sortable_table(shown.headings, shown.rows, name=shown.title, text_columns=shown.text_columns)
    return drawn + _below(shown)


def _below(shown: TextTable) -> str:
    return "".join(paragraph(line) for line in shown.caption.splitlines())


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (value, name, its interval or conditions)."""
    items = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><span>{escape(about)}</span></div>'
        for value, name, about in figures
    )
    return f'<div class="tiles">{"".join(items)}</div>'


def figure(svg: str, *, legend: Iterable[tuple[str, str]] = ()) -> str:
    """An inline SVG with an optional legend of (name, colour): of those colours that are drawn."""
    shown = [(name, "currentColor" if color == INK else color) for name, color in legend if color[:7] in svg]
    entries = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in shown)
    caption = f'<div class="legend">{entries}</div>' if entries else ""
    return f"<figure>{caption}{svg}</figure>"


def write_page(text: str, *, path: str | os.PathLike[str]) -> None:
    """Write a page; it appears whole or not at all. Raises InputError when it cannot be written."""
    try:
        write_atomically(Path(path), text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the page cannot be written: {reason}", got=str(path), allowed="a file in a writable folder"
        ) from None


def fragment(title: str, parts: Iterable[str], *, lead: str = "") -> str:
    """Return the HTML of one result. `title` and `lead` are text, `parts` are HTML."""
    style, below = _style_sheet("fragment.css"), paragraph(lead) if lead else ""
    return f'<div class="meshwright"><style>{style}</style><h4>{escape(title)}</h4>{below}{"".join(parts)}</div>'
