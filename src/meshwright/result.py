"""Base class of every answer: the object that a command prints and that a function of `meshwright` returns.

to_dict()        the document that the command writes with --json
to_frame()       a pandas DataFrame; units are in the names of the columns
_repr_html_()    table and figure for a notebook, in one piece
str(), repr()    one line

Work that takes long calls an `Advance` with the amount of work done.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.errors import MissingDependencyError
from meshwright.programs import install_command

if TYPE_CHECKING:
    import pandas

DRAWN = "meshwright.report.drawn"
"""The module with the table of what draws each answer, opened by its name: it stands above all answers."""

Advance = Callable[[float], None]


def ignore(amount: float) -> None:
    """Show no progress."""


class Result(ABC):
    """An answer that can be printed, written as JSON, turned into a table and shown in a notebook."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command writes with `--json`: dicts, lists, text and finite numbers."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `to_frame()` as dicts of scalars. A unit is the end of its column's name."""

    @abstractmethod
    def summary(self) -> str:
        """Return one line of text."""

    def _repr_html_(self) -> str:
        """Return HTML for a notebook. Nothing is loaded from elsewhere."""
        return import_module(DRAWN).notebook_html(self)

    def write_html(self, path: str | os.PathLike[str], *, command: str = "") -> None:
        """Write this answer as one page that opens offline. `command` is the command line that makes it.

        Raises:
            InputError: `path` cannot be written, or the answer lacks what its page shows.
        """
        import_module(DRAWN).write_page_of(self, path=path, command=command)

    def to_frame(self) -> pandas.DataFrame:
        """Return the rows of this result as a pandas DataFrame.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "to_frame() needs pandas, which is not installed",
                hint=f"{install_command('notebook')}; to_rows() returns the same rows as dicts",
            ) from error
        return pandas.DataFrame.from_records(self.to_rows())

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"
