"""Indexes by name (`indexes.toml`), with their parameters and the values that are allowed.

usearch:m=16,dtype=f32/i8,ef=32/64     two builds, each searched in two ways
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from meshwright.errors import InputError, value_named

MOST_CHOICES = 200


@dataclass(frozen=True, kw_only=True)
class IndexParameter:
    """One parameter: whole numbers from `low` to `high`, or one of `names`."""

    default: str
    low: int = 1
    high: int = 0
    names: tuple[str, ...] = ()
    of_search: bool = False  # can change without a new build
    meaning: str

    @property
    def allowed(self) -> str:
        return ", ".join(self.names) if self.names else f"{self.low} to {self.high}"

    def accepts(self, text: str) -> bool:
        if self.names:
            return text in self.names
        return text == self.default or (text.isdecimal() and len(text) < 9 and self.low <= int(text) <= self.high)


@dataclass(frozen=True, kw_only=True)
class IndexKind:
    """One kind of index: the package that has it, and its parameters."""

    package: str  # as it is imported
    install: str
    about: str
    parameters: Mapping[str, IndexParameter]


def _kinds() -> dict[str, IndexKind]:
    tables = tomllib.loads(Path(__file__).with_name("indexes.toml").read_text(encoding="utf-8"))
    known = {
        name: IndexParameter(**table | {"names": tuple(table.get("names", ()))})
        for name, table in tables["parameters"].items()
    }
    return {
        kind: IndexKind(**table | {"parameters": {name: known[name] for name in table["parameters"]}})
        for kind, table in tables["kinds"].items()
    }


KINDS = _kinds()


@dataclass(frozen=True, kw_only=True)
class IndexChoice:
    """One index with all of its parameters."""

    kind: str
    values: tuple[tuple[str, str], ...]

    def value(self, name: str) -> str:
        return dict(self.values)[name]

    @property
    def build(self) -> str:
        """Parameters of the build as text."""
        return self._text(of_search=False)

    @property
    def search(self) -> str:
        """Parameters of a search as text."""
        return self._text(of_search=True)

    @property
    def name(self) -> str:
        """Text in tables.

        >>> parse_index("usearch:ef=32")[0].name
        'usearch m=16,ef_build=128,dtype=f32,ef=32'
        """
        return " ".join(filter(None, [self.kind, ",".join(filter(None, [self.build, self.search]))]))

    def _text(self, *, of_search: bool) -> str:
        known = KINDS[self.kind].parameters
        return ",".join(f"{n}={v}" for n, v in self.values if known[n].of_search is of_search)


def parse_index(text: str) -> list[IndexChoice]:
    """Read `NAME` or `NAME:key=value/value,...`; all combinations. Raises InputError.

    >>> [choice.search for choice in parse_index("hnswlib:ef=32/64")]
    ['ef=32', 'ef=64']
    """
    kind, _, rest = text.strip().partition(":")
    known = value_named("index", kind, KINDS).parameters
    asked: dict[str, list[str]] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        name, equals, values = (t.strip() for t in part.partition("="))
        if not equals or name not in known:
            allowed = ", ".join(f"{n} ({p.allowed})" for n, p in known.items()) or "none"
            raise InputError(f"--index {kind} has no such parameter", got=part, allowed=allowed)
        if name in asked:
            raise InputError(f"--index {kind} has {name} twice", got=text)
        asked[name] = list(dict.fromkeys(v.strip() for v in values.split("/")))
        wrong = next((v for v in asked[name] if not known[name].accepts(v)), None)
        if wrong is not None:
            raise InputError(f"--index {kind}: {name}", got=wrong, allowed=known[name].allowed)
    options = [[(n, v) for v in asked.get(n, [p.default])] for n, p in known.items()]
    found = [IndexChoice(kind=kind, values=values) for values in product(*options)]
    if len(found) > MOST_CHOICES:
        raise InputError(f"--index {kind} has too many combinations", got=len(found), allowed=f"<= {MOST_CHOICES}")
    return found


def parse_indexes(texts: tuple[str, ...]) -> tuple[IndexChoice, ...]:
    """Read several index choices, without duplicates."""
    return tuple(dict.fromkeys(choice for text in texts for choice in parse_index(text)))
