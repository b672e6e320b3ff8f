"""Run files that ship: complete ones, to be planned, trained or changed by their name.

    data/run_files/llama3-8b.yaml       `meshwright plan llama3-8b --cluster h200-8x1`

The first lines of each state its origin and its assumptions.
"""

from __future__ import annotations

from functools import cache

from meshwright.catalog.entries import DATA, by_name
from meshwright.errors import UnknownNameError

FOLDER = DATA / "run_files"
ENDING = ".yaml"


@cache
def run_file_names() -> tuple[str, ...]:
    """All of them, by name."""
    return tuple(sorted(path.name.removesuffix(ENDING) for path in FOLDER.glob(f"*{ENDING}")))


@by_name
def run_file_text(name: str) -> str:
    """The text of one; raises UnknownNameError."""
    if name not in run_file_names():
        raise UnknownNameError("run file", name, known=run_file_names())
    return (FOLDER / f"{name}{ENDING}").read_text(encoding="utf-8")
