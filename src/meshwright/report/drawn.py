"""The table of functions that draw each answer: its display in a notebook, and its own page, if any.

`meshwright.result.Result` opens this module when an answer is drawn. Answers import nothing that draws them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name

from meshwright.files import toml_table
from meshwright.report.html import PageSection, document, write_page
from meshwright.result import Result
from meshwright.version import __version__

_TABLES = toml_table(Path(__file__).with_name("drawn.toml"))
NOTEBOOKS, PAGES = _TABLES["notebooks"], _TABLES["pages"]
"""The function of `report` that returns HTML for a notebook, and the one that returns the page, of each class."""


def notebook_html(answer: Result) -> str:
    """Return the HTML of an answer for a notebook. Raises TypeError for a class that is not in the table."""
    if (draw := _drawn(answer, NOTEBOOKS)) is None:
        raise TypeError(f"nothing draws {type(answer).__name__}: it is not in the table")
    return draw(answer)


def write_page_of(answer: Result, *, path: str | os.PathLike[str], command: str) -> None:
    """Draw the page of an answer and write it: its own page, or what a notebook shows of it.

    Raises InputError when it cannot be written, TypeError for a class that nothing draws.
    """
    if (draw := _drawn(answer, PAGES)) is not None:
        write_page(draw(answer, command=command), path=path)
        return
    shown = PageSection(title="", parts=[notebook_html(answer)], is_wide=True)
    footer = f"Meshwright {__version__}. {command}"
    write_page(document(title=answer.summary(), lead="", sections=[shown], footer=footer), path=path)


def _drawn(answer: Result, drawn: Mapping[str, str]) -> Callable[..., str] | None:
    """Return the function of the answer's class, or of the nearest one that it is derived from."""
    for each in type(answer).__mro__:
        name = f"{each.__module__.removeprefix('meshwright.')}:{each.__qualname__}"
        if name in drawn:
            return resolve_name(f"meshwright.report.{drawn[name]}")
    return None
