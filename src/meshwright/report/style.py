"""The style sheet of every page: one language for estimates, trainings, studies, comparisons and reports."""

from __future__ import annotations

from meshwright.report.figures import FAINT, INK

COLUMN = "46rem"
"""Least width of one of two columns: figures have nearly their full size in it, with text of at least 10.5 pixels."""

EDGE = "no-repeat local, linear-gradient(to {0}, var(--shade), transparent) {1} 0 / .8rem 100% no-repeat"
SCROLL_CUES = ", ".join(
    f"linear-gradient(to {towards}, var(--paper) 40%, transparent) {side} 0 / 2rem 100% {EDGE.format(towards, side)}"
    for side, towards in (("left", "right"), ("right", "left"))
)
"""A shade at each edge behind which a table goes on. What scrolls with the table covers it at the table's end."""

STYLE = f"""
:root {{
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #16191d; --soft: #5b6470; --line: #dfe2e6; --tile: #f3f4f5;
  --accent: #2f66a3; --warn: #b5525c; --shade: rgb(0 0 0 / .22);
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #14171b; --ink: #e8eaed; --soft: #a2abb6; --line: #333a42; --tile: #1d2126; --accent: #8ab6e8;
    --shade: rgb(255 255 255 / .3);
  }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", sans-serif }}
main {{ max-width: 108rem; margin: 0 auto; padding: 3rem clamp(1rem, 3vw, 4rem) 4rem }}
.sections {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, {COLUMN}), 1fr)); gap: 0 4rem;
  align-items: start }}
section {{ min-width: 0 }}
.beside {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, {COLUMN}), 1fr)); gap: 0 3rem;
  align-items: start }}
.beside > * {{ min-width: 0 }}
section.wide, section.lone {{ grid-column: 1 / -1 }}
section.lone {{ columns: {COLUMN} 2; column-gap: 4rem }} section.lone > h2 {{ column-span: all }}
section.lone > :not(h2) {{ break-inside: avoid; margin-top: 0 }}
.skip {{ position: absolute; left: -100vw }}
.unseen {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }}
.skip:focus {{ left: 1rem; top: 1rem; background: var(--tile); padding: .6rem 1rem }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; list-style: none; padding: 0; margin: 1.6rem 0 0;
  font-size: .9rem }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em }}
h2 {{ font-size: 1.15rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line) }}
p {{ max-width: 44rem }}
h1, h2, h3, p, nav, .tile, .legend, summary, footer {{ overflow-wrap: anywhere; min-width: 0 }}
.lead {{ color: var(--soft); margin: 0 0 1.6rem }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .8rem }}
.tile {{ background: var(--tile); border-radius: .5rem; padding: .8rem 1rem }}
.tile b {{ display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums }}
.tiles + p {{ margin-top: 1.2rem }}
.tile span {{ display: block; color: var(--soft); font-size: .8rem }}
h3 {{ font-size: 1rem; margin: 1.6rem 0 .2rem }}
figure {{ margin: 1rem 0 1rem -1rem; padding-left: 1rem; overflow-x: auto; overflow-y: hidden; max-width: 62rem }}
svg {{ max-width: 100%; height: auto; overflow: visible }}
figure > svg {{ width: 100% }} .wide figure {{ max-width: 84rem }}
@media screen and (max-width: 40rem) {{
  svg.for-wide {{ display: none }} svg.for-narrow {{ display: block !important }}
}}
details {{ margin: .2rem 0 1.4rem; font-size: .9rem }}
summary {{ cursor: pointer; color: var(--accent); font-size: .85rem }}
.caution {{ border-left: .25rem solid var(--warn); padding-left: .8rem }}
svg text {{ font-family: inherit }}
svg.timeline text {{ font-size: 12px; fill: var(--soft) }}
@media screen and (max-width: 60rem) {{ svg.timeline.for-wide text {{ font-size: 18px }} }}
svg [fill="{INK}"] {{ fill: var(--ink) }} svg [stroke="{INK}"] {{ stroke: var(--ink) }}
svg [fill="{FAINT}"] {{ fill: var(--line) }} svg [stroke="{FAINT}"] {{ stroke: var(--line) }}
.legend span {{ display: inline-block; margin-right: 1.2rem; font-size: .85rem }}
.legend i {{ display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em }}
.table {{ overflow-x: auto; margin: .8rem 0 1.2rem; max-width: 100%; background: {SCROLL_CUES} }}
table {{ border-collapse: collapse; font-size: .95rem }}
caption {{ text-align: left; font-size: .8rem; color: var(--soft); padding-bottom: .3rem }}
th button {{ all: unset; cursor: pointer; font: inherit }}
th button:focus-visible {{ outline: 2px solid var(--accent) }}
th[aria-sort="ascending"] button::after {{ content: " \\25B2" }}
th[aria-sort="descending"] button::after {{ content: " \\25BC" }}
.actions {{ font-size: .8rem }} .actions > * {{ margin-right: .6rem }}
.actions button, .actions input {{ font: inherit; color: var(--ink); background: var(--tile);
  border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .6rem }}
.actions button {{ cursor: pointer }} .actions button:hover {{ border-color: var(--accent) }}
th {{ font-size: .8rem; font-weight: 600; color: var(--soft) }}
th, td {{ padding: .28rem 1.4rem .28rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums }}
th:first-child, td:first-child {{ text-align: left }}
th.text, td.text {{ text-align: left; vertical-align: top }}
.dense th, .dense td {{ padding-right: .9rem; font-size: .82rem }}
.dense th {{ font-size: .74rem }}
.broad th, .broad td {{ padding-right: .6rem }}
td:not(.text):not(:first-child) {{ white-space: nowrap }}
pre {{ background: var(--tile); border-radius: .5rem; padding: 1rem; overflow-x: auto;
  font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap }}
a {{ color: var(--accent); overflow-wrap: anywhere }}
sup a {{ text-decoration: none; padding-left: .1em }} sup + sup::before {{ content: "," }}
sup {{ line-height: 0; font-size: max(.7em, 11px) }}
ol.notes {{ font-size: .87rem; color: var(--soft); padding-left: 1.4rem }}
ol.notes li {{ margin-bottom: .35rem; overflow-wrap: anywhere }}
footer {{ margin-top: 3rem; color: var(--soft); font-size: .8rem }}
@media print {{
  :root {{ --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --tile: #f4f4f4; --accent: #000 }}
  body {{ font-size: 10pt }} main {{ max-width: none; padding: 0 }}
  .sections {{ display: block }} nav, .actions, .skip {{ display: none }} .table, figure {{ overflow: visible }}
  svg {{ min-width: 0 }} table {{ font-size: 8pt; max-width: 100% }} .wide table {{ font-size: 6.5pt }}
  th, td, .dense th, .dense td {{ padding-right: .5rem; font-size: inherit }}
  td:not(.text):not(:first-child) {{ padding-right: .5rem; white-space: normal }}
  .sortable td:first-child {{ overflow-wrap: anywhere; min-width: 5em }}
  th {{ font-size: inherit }} details:not([open]) {{ display: none }}
  figure, .explained, .tiles, pre, tr {{ break-inside: avoid }} h2, h3 {{ break-after: avoid }}
}}
"""
