"""The table of functions that draw each answer: its display in a notebook, and the page that it writes, if any.

`meshwright.result.Result` opens this module when an answer is drawn. Answers import nothing that draws them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name

from meshwright.files import toml_table
from meshwright.report.html import write_page
from meshwright.result import Result

_TABLES = toml_table(Path(__file__).with_name("drawn.toml"))
NOTEBOOKS, PAGES = _TABLES["notebooks"], _TABLES["pages"]
"""The function of `report` that returns HTML for a notebook, and the one that returns the page, of each class."""


def notebook_html(answer: Result) -> str:
    """Return the HTML of an answer for a notebook. Raises TypeError for a class that is not in the table."""
    return _drawn(answer, NOTEBOOKS, what="nothing draws {}: it is not in the table")(answer)


def write_page_of(answer: Result, *, path: str | os.PathLike[str], **about: str) -> None:
    """Draw the page of an answer and write it. `about` goes to what draws it.

    Raises InputError when it cannot be written, TypeError for a class that has no page in the table.
    """
    draw = _drawn(answer, PAGES, what="no page is drawn of {}")
    write_page(draw(answer, **about), path=path)


def _drawn(answer: Result, drawn: Mapping[str, str], *, what: str) -> Callable[..., str]:
    """Return the function of the answer's class, or of the nearest one that it is derived from."""
    for each in type(answer).__mro__:
        name = f"{each.__module__.removeprefix('meshwright.')}:{each.__qualname__}"
        if name in drawn:
            return resolve_name(f"meshwright.report.{drawn[name]}")
    raise TypeError(what.format(type(answer).__name__))
