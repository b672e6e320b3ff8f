"""The run file: one YAML schema for every engine, read once into a `specs.run.Run`.

    text -> document (YAML, lines known) -> schema (types) -> resolve (names, what must fit together) -> Run

    load(path, overrides=("batch.micro=2",)) -> Run
    loads(text) -> Run
    from_options(model=..., cluster=..., global_batch=..., sequence_length=...) -> Run
    pin_plan(run, plan, out)            the same file with the plan written into it

The functions are imported when they are first used: pydantic and the YAML reader cost a fifth of a second,
which `--help` should not pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.runfile.reading import from_options, load, loads
    from meshwright.runfile.writing import pin_plan, pinned_text

__all__ = ["from_options", "load", "loads", "pin_plan", "pinned_text"]

_HOME = {"from_options": "reading", "load": "reading", "loads": "reading"} | {
    "pin_plan": "writing",
    "pinned_text": "writing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
