"""The run file: one YAML schema for every engine, read once into a `specs.run.Run`.

    text -> document (YAML, lines known) -> schema (types) -> resolve (names, what must fit together) -> Run

    load(path, overrides=("batch.micro=2",)) -> Run
    loads(text) -> Run
    from_mapping({"model": ...}) -> Run
    from_options(model=..., cluster=..., global_batch=..., sequence_length=...) -> Run
    named_model(name), named_cluster(name)   what `--model` and `--cluster` name
    pin_plan(run, plan, out)            the same file with the plan written into it
    changed_text(run, values, ...)      its text with other values changed; write_text(text, out)

The functions are imported when they are first used: pydantic and the YAML reader cost a fifth of a second,
which `--help` should not pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.runfile.document import NamedOverride
    from meshwright.runfile.reading import from_mapping, from_options, load, loads
    from meshwright.runfile.resolve import named_cluster, named_model
    from meshwright.runfile.writing import changed_text, pin_plan, pinned_text, replay_text, stated_text, write_text

_HOME = {
    "NamedOverride": "document",
    **dict.fromkeys(("from_mapping", "from_options", "load", "loads"), "reading"),
    **dict.fromkeys(("named_cluster", "named_model"), "resolve"),
    **dict.fromkeys(("changed_text", "pin_plan", "pinned_text", "replay_text", "stated_text", "write_text"), "writing"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
