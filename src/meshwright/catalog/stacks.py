"""Software stacks by name: their lineage and the traits the cost model asks for."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshwright.catalog.engines import engine_facts
from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Stack


@dataclass(frozen=True, kw_only=True)
class StackFacts:
    """Facts about a framework. `newest`: the latest vintage with data, as a decimal year."""

    name: str
    title: str
    lineage: str
    source: str
    newest: float
    unfused_attention: bool = False
    unfused_norm: bool = False
    overlaps_data: bool = False
    deduplicates: bool = False


@cache
def _data() -> dict[str, dict[str, object]]:
    text = (files("meshwright.catalog") / "data" / "stacks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def stack_names() -> list[str]:
    """All frameworks of the catalogue."""
    return sorted(_data())


def stack_facts(framework: str) -> StackFacts:
    """Facts about one framework; UnknownNameError names the nearest known one."""
    if framework not in stack_names():
        raise UnknownNameError("stack", framework, known=stack_names())
    return StackFacts(name=framework, **_data()[framework])  # pyright: ignore[reportArgumentType]


def stack_for_engine(engine: str) -> Stack:
    """The stack that stands for an engine of the run file, at the newest vintage with data."""
    return Stack(framework=engine_facts(engine).stack)
