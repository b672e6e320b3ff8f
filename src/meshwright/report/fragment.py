"""HTML of one result inside a notebook: a title, tables and inline SVG, with a style that stays inside it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from meshwright.report.figures import FAINT, INK
from meshwright.report.html import paragraph

STYLE = f"""
.meshwright {{ font-family: system-ui, "Segoe UI", sans-serif; max-width: 62rem; line-height: 1.45 }}
.meshwright h4 {{ margin: .2rem 0 .3rem; font-size: 1.05rem }}
.meshwright caption {{ text-align: left; padding: .6rem 0 .2rem; font-weight: 600 }}
.meshwright p {{ margin: .2rem 0 .6rem; opacity: .75; font-size: .9rem }}
.meshwright table {{ border-collapse: collapse; margin: .3rem 0; font-size: .88rem }}
.meshwright th, .meshwright td {{ padding: .2rem 1rem .2rem 0; text-align: right;
  border-bottom: 1px solid rgba(128, 128, 128, .35); font-variant-numeric: tabular-nums }}
.meshwright th:first-child, .meshwright td:first-child, .meshwright .text {{ text-align: left }}
.meshwright .tiles {{ display: flex; flex-wrap: wrap; gap: .7rem }}
.meshwright .tile {{ background: rgba(128, 128, 128, .12); border-radius: .4rem; padding: .5rem .8rem }}
.meshwright .tile b {{ display: block; font-size: 1.15rem }}
.meshwright .tile span {{ display: block; opacity: .75; font-size: .78rem }}
.meshwright figure {{ margin: .6rem 0 }}
.meshwright svg {{ max-width: 100%; height: auto; overflow: visible }}
.meshwright svg [fill="{INK}"] {{ fill: currentColor }} .meshwright svg [stroke="{INK}"] {{ stroke: currentColor }}
.meshwright svg [stroke="{FAINT}"] {{ stroke: rgba(128, 128, 128, .35) }}
.meshwright .legend span {{ margin-right: 1rem; font-size: .82rem }}
.meshwright .legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
"""


def fragment(title: str, parts: Iterable[str], *, lead: str = "") -> str:
    """Return the HTML of one result. `title` and `lead` are text, `parts` are HTML."""
    below = paragraph(lead) if lead else ""
    return f'<div class="meshwright"><style>{STYLE}</style><h4>{escape(title)}</h4>{below}{"".join(parts)}</div>'
