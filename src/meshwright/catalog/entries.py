"""Read the catalogue's data: one TOML file per entry, its name is the entry's name.

    data/models/llama3-8b.toml
    data/accelerators/h100.toml
    data/fabrics/nvl72.toml

An entry holds the fields of the value that it describes (`specs.model.Model`, `specs.hardware.Accelerator`,
`specs.hardware.Fabric`) and the facts by which a reader can judge them:

    [sources]      field -> title, link, date or quote; "all" for the fields that are not named
    [conflicts]    field -> disagreement of sources, the choice and its reason
    [assumptions]  an assumption, and the reason
    [unknown]      values that no source gives
    [published]    figures that others print; never read by the cost model

The name of an entry reads that entry alone. Any other name reads all entries for their aliases.

`data/models.json` has further models, each with the same keys and a title: name -> entry. `repositories` of an entry
are those of the Hugging Face hub whose config.json has its shapes; their names are aliases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from meshwright.errors import InputError, UnknownNameError
from meshwright.json_values import load_json

DATA = Path(__file__).parent / "data"

_LookUp = TypeVar("_LookUp", bound=Callable[..., Any])

DESCRIBE = (
    "another device is a file of its data sheet's figures (--accelerator FILE, docs/guides/adding-an-accelerator.md), "
    "or is measured where it is: `cluster: here`"
)
"""The way on where no accelerator has the name that was given."""

ABOUT = ("sources", "conflicts", "assumptions", "unknown", "published")
"""Tables of an entry about its values."""


class CatalogKind(StrEnum):
    """Kind of thing that an entry describes."""

    MODEL = "model"
    ACCELERATOR = "accelerator"
    FABRIC = "fabric"

    @property
    def folder(self) -> Path:
        return DATA / f"{self.value}s"


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """One catalogue file: `values` are the described thing's own fields, the rest is about them."""

    kind: CatalogKind
    name: str
    title: str
    values: dict[str, Any]
    aliases: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()  # of the Hugging Face hub, OWNER/NAME
    sources: dict[str, str] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    assumptions: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)

    @property
    def hub_names(self) -> tuple[str, ...]:
        """Names of its repositories, without their owners."""
        return tuple(repository.rpartition("/")[2] for repository in self.repositories)

    def source_of(self, path: str) -> str | None:
        """Return the source of the value at `path`, such as `attention.head_dim`; None if it has none."""
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return self.sources.get("all")


def by_name(look_up: _LookUp) -> _LookUp:
    """Check the names that a look-up is given before they meet a cache or a dictionary.

    Raises InputError when it is no text, as `mw.catalog.model(["llama3-8b"])`.
    """

    @wraps(look_up)
    def checked(*args: Any, **given: Any) -> Any:
        for name in args[:1]:
            require_text(name)
        for key, name in given.items():
            if key == "name" or (key.endswith("_name") and name is not None):
                require_text(name)
        return look_up(*args, **given)

    if clear := getattr(look_up, "cache_clear", None):
        vars(checked)["cache_clear"] = clear
    return cast(_LookUp, checked)


def require_text(name: object) -> None:
    """Raise InputError when `name` is no text."""
    if not isinstance(name, str):
        raise InputError("a name of the catalogue", got=type(name).__name__, allowed="text such as 'llama3-8b'")


@cache
def names(kind: CatalogKind) -> tuple[str, ...]:
    """Names of all entries of `kind`, in natural order (llama3-8b before llama3-70b)."""
    return tuple(sorted((*(path.stem for path in kind.folder.glob("*.toml")), *_listed(kind)), key=_natural))


@cache
def _listed(kind: CatalogKind) -> dict[str, dict[str, Any]]:
    """Entries of the one file that holds many, by name."""
    path = DATA / f"{kind.value}s.json"
    return load_json(path) if path.exists() else {}


def entry(kind: CatalogKind, name: str) -> CatalogEntry:
    """The entry `name`, which may be an alias; capitals, spaces and underscores do not matter.

    Raises UnknownNameError when neither a name nor an alias matches, InputError when `kind` is no kind.
    """
    require_text(name)
    if not isinstance(kind, str) or kind not in tuple(CatalogKind):
        raise InputError("a kind of entry", got=str(kind)[:64], allowed=", ".join(CatalogKind))
    return _entry(CatalogKind(kind), name)


@cache
def _entry(kind: CatalogKind, name: str) -> CatalogEntry:
    key = normal_name(name)
    if key in names(kind):
        return _read(kind, key)
    found = _aliases(kind).get(key)
    if found is None:
        error = UnknownNameError(kind.value, name, known=names(kind))
        if kind is CatalogKind.ACCELERATOR:
            error.hint = f"{error.hint}; {DESCRIBE}"
        raise error
    return _read(kind, found)


@cache
def _read(kind: CatalogKind, name: str) -> CatalogEntry:
    if (values := _listed(kind).get(name)) is not None:
        return _entry_of(values, kind=kind, name=name)
    return entry_of_text((kind.folder / f"{name}.toml").read_text(encoding="utf-8"), kind=kind, name=name)


def entry_of_text(text: str, *, kind: CatalogKind, name: str) -> CatalogEntry:
    """Return the entry that the text of a file describes. Raises tomllib.TOMLDecodeError where it is no TOML."""
    import tomllib

    title = text.partition("\n")[0].removeprefix("#").strip()
    return _entry_of(tomllib.loads(text) | {"title": title}, kind=kind, name=name)


def _entry_of(given: dict[str, Any], *, kind: CatalogKind, name: str) -> CatalogEntry:
    values = dict(given)
    about = {key: values.pop(key, {}) for key in ABOUT}
    others = {key: tuple(values.pop(key, ())) for key in ("aliases", "repositories")}
    return CatalogEntry(kind=kind, name=name, title=values.pop("title"), values=values, **others, **about)


@cache
def _aliases(kind: CatalogKind) -> dict[str, str]:
    found = [_read(kind, name) for name in names(kind)]
    of_hub = {normal_name(known): one.name for one in found for known in one.hub_names}
    return of_hub | {normal_name(alias): one.name for one in found for alias in one.aliases}


def normal_name(name: str) -> str:
    """Return the name as look-ups compare it: small letters, a hyphen for spaces and underscores."""
    return "-".join(name.lower().replace("_", " ").split())


def _natural(name: str) -> tuple[tuple[int, float, str], ...]:
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", name)
    return tuple((0, float(p), "") if p[0].isdigit() else (1, 0.0, p) for p in parts)
