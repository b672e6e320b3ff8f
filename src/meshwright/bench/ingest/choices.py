"""Indexes by name, with their parameters and the values that are allowed.

usearch:m=16,dtype=f32/i8,ef=32/64     two builds, each searched in two ways
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

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


M = IndexParameter(default="16", low=2, high=512, meaning="links of a node in each layer")
EF_BUILD = IndexParameter(default="128", low=1, high=100_000, meaning="candidates while a node is added")
EF = IndexParameter(default="64", low=1, high=100_000, of_search=True, meaning="candidates of a search")


@dataclass(frozen=True, kw_only=True)
class IndexKind:
    """One kind of index: the package that has it, and its parameters."""

    package: str  # as it is imported
    install: str
    about: str
    parameters: Mapping[str, IndexParameter]


KINDS = {
    "flat": IndexKind(
        package="faiss", install="meshwright[ingest]", about="exact: every vector is compared (faiss IndexFlatIP)",
        parameters={},
    ),
    "usearch": IndexKind(
        package="usearch", install="meshwright[ingest]", about="graph (HNSW), vectors in a narrow format",
        parameters={
            "m": M, "ef_build": EF_BUILD, "ef": EF,
            "dtype": IndexParameter(
                default="f32", names=("f32", "bf16", "f16", "i8"), meaning="number format of the stored vectors"
            ),
        },
    ),
    "hnswlib": IndexKind(
        package="hnswlib", install="hnswlib==0.8.0", about="graph (HNSW), the algorithm's own library",
        parameters={"m": M, "ef_build": EF_BUILD, "ef": EF},
    ),
    "faiss-hnsw": IndexKind(
        package="faiss", install="meshwright[ingest]", about="graph (HNSW) of faiss",
        parameters={"m": M, "ef_build": EF_BUILD, "ef": EF},
    ),
    "faiss-ivf": IndexKind(
        package="faiss", install="meshwright[ingest]",
        about="inverted lists around centroids, trained on the vectors",
        parameters={
            "lists": IndexParameter(
                default="auto", low=1, high=10_000_000, meaning="lists; auto: 4 sqrt(N), at most N / 39"
            ),
            "probe": IndexParameter(
                default="8", low=1, high=10_000_000, of_search=True, meaning="lists that a search reads"
            ),
        },
    ),
}  # fmt: skip


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
