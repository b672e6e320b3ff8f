"""Listings of the catalogue and single entries: what `meshwright catalog` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.answers.documents import catalog as documents
from meshwright.answers.documents.catalog import leaves
from meshwright.catalog.lookup import claim
from meshwright.errors import InputError
from meshwright.json_values import jsonable
from meshwright.result import Result

KINDS = ("models", "accelerators", "clusters", "claims", "runs")
_ROWS_KEY = {"clusters": "fabrics"}
"""Key of the rows in a listing's document where it is not the kind."""

_NAME_KEY = {"claims": "claim_id"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CatalogItem(Result):
    """One entry of the catalogue: its values, and the source of each.

    Attributes:
        kind: models, accelerators, clusters, claims or runs.
        name: name of the entry.
        document: everything that is known of it.
    """

    kind: str
    name: str
    document: dict[str, Any] = field(repr=False)

    @property
    def values(self) -> dict[str, Any]:
        """The entry's own fields; units are in their names."""
        return self.document.get("values", self.document)

    @property
    def sources(self) -> dict[str, str]:
        """Source by field; "all" stands for the fields that are not named."""
        return self.document.get("sources", {})

    def to_dict(self) -> dict[str, Any]:
        return jsonable(self.document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each field: its dotted path, its value and its source."""
        source_of = self.document.get("source_of", {})
        found = [(path, value) for path, value in leaves(self.values) if path != "text"]
        found += list(leaves(self.document.get("computed", {})))
        return [{"field": path, "value": value, "source": source_of.get(path)} for path, value in found]

    def summary(self) -> str:
        """Return the entry's kind, name and title."""
        title = self.document.get("title") or self.document.get("metric") or self.document.get("task") or ""
        return f"{self.kind.removesuffix('s')} {self.name}: {title}".removesuffix(": ")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CatalogListing(Result):
    """All entries of one kind. Iterating yields their names; `listing[name]` is one entry.

    Attributes:
        kind: models, accelerators, clusters, claims or runs.
        rows: one mapping for each entry.
        document: the listing as JSON has it.
    """

    kind: str
    document: dict[str, Any] = field(repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each entry; units are in the names of the keys."""
        return self.document[_ROWS_KEY.get(self.kind, self.kind)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the entries."""
        return tuple(row[_NAME_KEY.get(self.kind, "name")] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> CatalogItem:
        if not isinstance(name, str):
            raise InputError(f"{self.kind}[...]", got=name, allowed="a name")
        return catalog_entry(self.kind, name)

    def to_dict(self) -> dict[str, Any]:
        return jsonable(self.document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each entry."""
        rows = [dict(leaves(row)) for row in self.rows]
        return [{name: jsonable(value) for name, value in row.items()} for row in rows]

    def summary(self) -> str:
        """Return the number of entries and the first names."""
        first = ", ".join(self.names[:4])
        return f"{len(self)} {self.kind}: {first}{', ...' if len(self) > 4 else ''}"


def catalog_listing(kind: str, *, predict: bool = False) -> CatalogListing:
    """List all entries of `kind`. `predict` adds predictions to claims and runs, which takes half a minute."""
    made = {"claims": documents.claims_document, "runs": partial(documents.run_files_document, None)}
    document = made[kind](predict=predict) if kind in made else documents.listing_document(kind)
    return CatalogListing(kind=kind, document=document)


def catalog_entry(kind: str, name: str, *, predict: bool = False) -> CatalogItem:
    """Look up one entry of `kind`. Raises UnknownNameError."""
    if kind == "claims":
        document = documents.claim_document(claim(name), predict=predict)
    elif kind == "runs":
        document = documents.run_files_document(name, predict=predict)
    else:
        document = documents.details_document(kind, name)
    return CatalogItem(kind=kind, name=document.get("name", name), document=document)
