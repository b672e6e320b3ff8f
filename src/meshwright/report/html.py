"""A page that is one file: no scripts, no fonts, nothing loaded; light and dark; prints well.

document(title=..., lead=..., sections=[PageSection(...)])  -> text
write_page(text, path=...)                               the whole file appears or none of it
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.report.figures import FAINT, INK
from meshwright.report.text_table import TextTable, unbroken

STYLE = f"""
:root {{
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #16191d; --soft: #5b6470; --line: #dfe2e6; --tile: #f3f4f5; --accent: #2f66a3;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #14171b; --ink: #e8eaed; --soft: #a2abb6; --line: #333a42; --tile: #1d2126; --accent: #8ab6e8;
  }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 "Charter", "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif }}
main {{ max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem }}
h1, h2, th, .tile, figure, .legend, footer {{ font-family: system-ui, "Segoe UI", sans-serif }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em }}
h2 {{ font-size: 1.15rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line) }}
p {{ max-width: 44rem }}
.lead {{ color: var(--soft); margin: 0 0 1.6rem }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .8rem }}
.tile {{ background: var(--tile); border-radius: .5rem; padding: .8rem 1rem }}
.tile b {{ display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums }}
.tiles + p {{ margin-top: 1.2rem }}
.tile span {{ display: block; color: var(--soft); font-size: .8rem }}
figure {{ margin: 1rem 0 }}
svg {{ max-width: 100%; height: auto; overflow: visible }}
svg text {{ font-family: system-ui, "Segoe UI", sans-serif }}
svg.timeline {{ width: 100% }}
svg.timeline text {{ font-size: 11px; fill: var(--soft) }}
svg [fill="{INK}"] {{ fill: var(--ink) }} svg [stroke="{INK}"] {{ stroke: var(--ink) }}
svg [fill="{FAINT}"] {{ fill: var(--line) }} svg [stroke="{FAINT}"] {{ stroke: var(--line) }}
.legend span {{ margin-right: 1.2rem; font-size: .85rem }}
.legend i {{ display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em }}
table {{ border-collapse: collapse; margin: .8rem 0 1.2rem; font-size: .95rem }}
th {{ font-size: .8rem; font-weight: 600; color: var(--soft) }}
th, td {{ padding: .28rem 1.4rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums }}
th:first-child, td:first-child {{ text-align: left }}
th.text, td.text {{ text-align: left; vertical-align: top }}
pre {{ background: var(--tile); border-radius: .5rem; padding: 1rem; overflow-x: auto;
  font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap }}
a {{ color: var(--accent); overflow-wrap: anywhere }}
sup a {{ text-decoration: none; padding-left: .1em }} sup + sup::before {{ content: "," }}
sup {{ line-height: 0; font-size: .7em }}
ol.notes {{ font-size: .87rem; color: var(--soft); padding-left: 1.4rem }}
ol.notes li {{ margin-bottom: .35rem; overflow-wrap: anywhere }}
footer {{ margin-top: 3rem; color: var(--soft); font-size: .8rem }}
@media print {{
  :root {{ --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --tile: #f4f4f4; --accent: #000 }}
  body {{ font-size: 10pt }} main {{ max-width: none; padding: 0 }}
  figure, table, .tiles, pre {{ break-inside: avoid }} h2 {{ break-after: avoid }}
}}
"""


LINK = re.compile(r"(?P<url>https?://[^\s<>,;)\]]+[^\s<>,;.)\]])|\bgithub:(?P<repository>[\w.-]+/[\w.-]*\w)")
"""Links in a source: a page, or a repository in the short form of the catalogue."""


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A heading and the HTML below it."""

    title: str
    parts: Sequence[str]


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


def document(*, title: str, lead: str, sections: Iterable[PageSection], footer: str) -> str:
    """The whole page. `title` and `footer` are text, `lead` and the sections' parts are HTML."""
    body = "".join(f"<section><h2>{escape(s.title)}</h2>{''.join(s.parts)}</section>" for s in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{lead}{body}"
        f"<footer>{escape(footer)}</footer></main></body></html>\n"
    )


def paragraph(text: str, *, marks: str = "", css_class: str = "") -> str:
    """A paragraph of text with the numbers of its notes."""
    attribute = f' class="{css_class}"' if css_class else ""
    return f"<p{attribute}>{escape(text)}{marks}</p>"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: Collection[str] = ()
) -> str:
    """A table: the first column and those named in `text_columns` are aligned left, figures right."""
    kinds = [' class="text"' if h in text_columns else "" for h in headings]
    head = "".join(f"<th{kind}>{escape(h)}</th>" for kind, h in zip(kinds, headings, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(str(c))}</td>" for kind, c in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text_table(shown: TextTable) -> str:
    """A report's table without its title; the caption is below it."""
    rows = [["" if c is None else unbroken(str(c)) for c in row] for row in shown.rows]
    below = "".join(paragraph(line) for line in shown.caption.splitlines())
    return table(shown.headings, rows, text_columns=shown.text_columns) + below


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (value, what it is, its interval or conditions)."""
    items = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span>'
        f"<span>{escape(about)}</span></div>"
        for value, name, about in figures
    )
    return f'<div class="tiles">{"".join(items)}</div>'


def figure(svg: str, *, legend: Iterable[tuple[str, str]] = ()) -> str:
    """An inline SVG with an optional legend of (name, colour)."""
    entries = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in legend
    )
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
