"""Run files that ship: complete ones, to be planned, trained or changed by their name.

    data/run_files/llama3-8b.yaml       `meshwright plan llama3-8b --cluster h200-8x1`

The first lines of each state its origin and its assumptions.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshwright.catalog.entries import DATA, by_name
from meshwright.errors import InputError, UnknownNameError
from meshwright.files import write_atomically

FOLDER = DATA / "run_files"
ENDING = ".yaml"
EXAMPLES = "examples"


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


def copy_examples(folder: Path) -> list[Path]:
    """Copy `examples` of the repository into `folder` and return the files; all of them, or InputError and none.

    A wheel holds them among its data, a checkout beside its sources.
    """
    source = next(one for one in (DATA / EXAMPLES, DATA.parents[3] / EXAMPLES) if one.is_dir())
    texts = {path.relative_to(source): path.read_bytes() for path in sorted(source.rglob("*.*")) if path.is_file()}
    for name, text in texts.items():
        if (there := folder / name).exists() and not (there.is_file() and there.read_bytes() == text):
            raise InputError(f"{there} is there, and is another file", hint="name a new folder: nothing is overwritten")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)
    return [folder / name for name in texts]
